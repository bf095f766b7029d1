"""Engines sample completions and score tokens; `base` says what each must give, and this file which one a run takes."""

import importlib.util

VLLM_TEMPERATURES = (0.01, 2.0)  # others it refuses or changes


def choose_engine(name: str, device: str, temperature: float) -> tuple[str, str]:
    """("vllm" or "hf", why) for what `--engine` says and the device it would run on. Raises ValueError for a temperature that
    the engine does not sample at."""
    engine, why = (name, "chosen by name") if name != "auto" else _automatic(device)
    low, high = VLLM_TEMPERATURES
    if engine == "vllm" and not low <= temperature <= high:
        raise ValueError(f"--temperature {temperature:g}: vLLM takes {low:g} to {high:g}; --engine hf takes any")
    return engine, why


def _automatic(device: str) -> tuple[str, str]:
    if not device.startswith("cuda"):
        return "hf", "auto on a CPU"
    if importlib.util.find_spec("vllm") is None:
        return "hf", "auto: vLLM is not installed (pip install -e '.[vllm]')"
    return "vllm", "auto on CUDA"
