"""From what `--model`, `--device`, `--renderer` and `--engine` say to things that work: shared by the scripts that ask a model.

torch and transformers are imported inside of the functions: a script answers --help and mistakes before it needs them.
"""

import os
import re
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

if TYPE_CHECKING:
    import torch

    from engines.base import Engine
    from renderers.base import Renderer

# What transformers raises for a folder that holds no whole model, and ValueError, whose message names its option if it is ours.
CANNOT_LOAD = (
    *(ValueError, OSError, RuntimeError, KeyError, SafetensorError),
    *(AttributeError, TypeError, StrictDataclassError),  # for a config.json that is something else's
)


def quiet() -> None:
    """Set what torch and transformers read when they are imported, and silence the latter."""
    # Waiting threads must not spin: beside one other busy process that made a step 15 times slower on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def find_device(device: str, dtype: str) -> "tuple[str, torch.dtype]":
    """(device, dtype of the forward pass) for what --device and --dtype say. Raises ValueError for a device that is not there."""
    import torch

    if device != "auto" and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"--device {device}: must be auto, cpu, cuda or cuda:N")
    found = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if found.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: PyTorch {torch.__version__} sees no CUDA device; take --device cpu")
    name = dtype if dtype != "auto" else "bfloat16" if found.startswith("cuda") else "float32"
    return found, getattr(torch, name)


def load_renderer(path: str, name: str, **options: Any) -> "tuple[Renderer, str]":
    """(the renderer that --renderer `name` chooses for the model at path, which one and why, in words). Raises one of CANNOT_LOAD."""
    from transformers import AutoConfig, AutoTokenizer

    from renderers import make_renderer, resolve_name

    tokenizer = AutoTokenizer.from_pretrained(path)
    model_type = AutoConfig.from_pretrained(path).model_type
    name, reason = resolve_name(name, tokenizer, model_type)
    return make_renderer(name, tokenizer, model_type, **options), f"renderer {name} ({reason})"


def load_engine(name: str, path: str, device: str, dtype: "torch.dtype", max_context: int, **for_vllm: Any) -> "Engine":
    """The engine "vllm" or "hf" with the model at path; for_vllm: what the former needs to know of a trainer beside it. Raises one
    of CANNOT_LOAD."""
    if name == "vllm":
        from engines.vllm import VLLMEngine

        return VLLMEngine(path, device, dtype, max_context, **for_vllm)
    from engines.hf import HFEngine

    return HFEngine(path, device, dtype, max_context=max_context)
