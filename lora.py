"""LoRA (arXiv:2106.09685): a frozen matrix W [out, in] becomes W + (alpha / rank) B A, and only A [rank, in] and B [out, rank] train.

B begins at zero, so that training begins at the base model. The layers and the files are those of the library peft; here is what
a trainer beside a sampler needs around them: the same start on all ranks, and whole merged tensors under the base model's names.
"""

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from config import LoRA

NAME = "default"  # what peft calls an adapter that is the only one


def adapt(lm: PreTrainedModel, lora: LoRA, seed: int, base: str) -> dict[str, Any]:
    """Freeze the model and put adapters into it, in place. Returns what a checkpoint must agree on, as JSON types.

    base: name or path of the model, for those who load the adapters without us. Raises ValueError for targets that are not there.
    """
    from peft import LoraConfig, inject_adapter_in_model

    described = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(set(lora.targets)), "base": fingerprint(lm)}
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=_layers(lm, lora.targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    # peft draws A on the CPU, from the global generator, and warns of each matrix that it finds transposed.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(config, lm, NAME)
    return described


def _layers(lm: PreTrainedModel, targets: tuple[str, ...]) -> list[str]:
    """Full names of the linear layers that the targets mean, each the end of a name. The head is none of them: the forward pass
    reads its matrix and would go past an adapter."""
    head = lm.get_output_embeddings()
    linear = [name for name, m in lm.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    if "all-linear" in targets:
        return linear
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise ValueError(f"--lora.targets {target}: {type(lm).__name__} has no such linear layer, but {there}")
    return [name for name in linear if any(f".{name}".endswith(f".{target}") for target in targets)]


def fingerprint(lm: PreTrainedModel) -> str:
    """A mark of the base model: adapters fit no other, even of the same shapes. Some numbers of each tensor are enough."""
    digest = hashlib.blake2b(digest_size=8)
    for parameter in lm.parameters():
        digest.update(parameter.detach().flatten()[:64].cpu().numpy().tobytes())
    return digest.hexdigest()


def merged(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of a model by their plain Hugging Face names, one at a time, with the adapters (if it has any) added to
    copies. Gathers what is sharded, so all ranks must walk along."""
    adapted, state = _adapted(lm), lm.state_dict()
    for name, value in state.items():
        layer, _, leaf = name.rpartition(".base_layer.")
        if layer not in adapted:
            if not _is_adapters(name, adapted):
                yield name, whole(value)
        elif leaf == "weight":
            a, b = (whole(state[f"{layer}.lora_{which}.{NAME}.weight"]) for which in "AB")
            factors = (a.T, b.T) if adapted[layer].fan_in_fan_out else (b, a)
            yield f"{layer}.weight", torch.addmm(whole(value), *factors, alpha=adapted[layer].scaling[NAME])
        else:
            yield f"{layer}.{leaf}", whole(value)


def save_adapter(lm: PreTrainedModel, folder: Path) -> None:
    """Write the adapters as `peft.PeftModel.from_pretrained(base, folder)` loads them. All ranks gather, one writes."""
    adapted = _adapted(lm)
    tensors = {
        "base_model.model." + name.replace(f".{NAME}.", "."): whole(value).detach().cpu()
        for name, value in lm.state_dict().items()
        if _is_adapters(name, adapted)
    }
    if dist.get_rank() == 0:
        lm.peft_config[NAME].save_pretrained(folder)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def require_same(saved: dict[str, Any] | None, own: dict[str, Any] | None, folder: Path) -> None:
    """Raise ValueError where a checkpoint's adapters (None: it has none) are not of this run's kind."""
    if saved is None and own is not None:
        raise ValueError(f"--lora.rank {own['rank']}: {folder} was trained without LoRA; begin with --model {folder}")
    if own is None and saved is not None:
        raise ValueError(f"--resume-from {folder}: it holds adapters of LoRA; add --lora.rank {saved['rank']}")
    for knob in saved or ():
        if saved[knob] != own[knob] and knob == "base":
            raise ValueError(f"--resume-from {folder}: its adapters belong to another base than this --model")
        if saved[knob] != own[knob]:
            here, there = (" ".join(v[knob]) if knob == "targets" else v[knob] for v in (own, saved))
            raise ValueError(f"--lora.{knob} {here}: {folder} has {there}")


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, as all ranks together hold it: a collective where it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _adapted(lm: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers with an adapter, by name."""
    return {name: module for name, module in lm.named_modules() if hasattr(module, "lora_A")}


def _is_adapters(name: str, adapted: dict[str, nn.Module]) -> bool:
    """Whether a tensor of that name is A or B of an adapted layer."""
    return name.partition(".lora_")[0] in adapted
