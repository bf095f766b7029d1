"""Engines sample completions and score tokens; `base` says what each must give, and this file which one a run takes."""

import importlib.util


def choose_engine(name: str, device: str) -> tuple[str, str]:
    """("vllm" or "hf", why) for what `--engine` says and the device it would run on."""
    if name != "auto":
        return name, "chosen by name"
    if not device.startswith("cuda"):
        return "hf", "auto on a CPU"
    if importlib.util.find_spec("vllm") is None:
        return "hf", "auto: vLLM is not installed (pip install -e '.[vllm]')"
    return "vllm", "auto on CUDA"
