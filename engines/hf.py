"""The embedded engine: a decode loop over a transformers model and its KV cache. The default on a CPU.

It is the reference for the other engines, so its results do not depend on timing. Requests are collected until every
live episode waits for the engine (or for something outside) and then run together, in the order of their keys; a
request's randomness comes from its own key alone. The same seed gives the same run to the bit.
"""

import asyncio
import contextvars
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from engines.base import EPISODE, Completion, Engine, Sampling, accounted, head_of, seed_of

SCORE_TOKENS = 8192  # in one forward pass of `score`


@dataclass
class Request:
    """One waiting call of `generate` (with a sampling) or `score` (with a temperature)."""

    token_ids: list[int]
    sampling: Sampling | None
    temperature: float
    episode: Hashable
    future: asyncio.Future


class HFEngine(Engine):
    """Samples with a transformers model in this process.

    max_batch bounds the rows that are decoded at once. Raises what transformers raises for a folder without a whole model.
    """

    def __init__(
        self,
        model_path: str | Path,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_batch: int = 256,
        max_context: int | None = None,
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).to(device).eval()
        self.model.requires_grad_(False)
        super().__init__(min(max_context or 2**31, getattr(self.model.config, "max_position_embeddings", 2**31)))
        self.device, self.max_batch = device, max_batch
        # transformers 5.24 renames the argument.
        self._cache_name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        self._pending: list[Request] = []
        self._drain: asyncio.Task | None = None
        self._changed = asyncio.Event()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion (see `Engine.generate`)."""
        self._admit(prompt_ids)
        return await self._submit(list(prompt_ids), sampling, sampling.temperature)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Log-probabilities of given tokens (see `Engine.score`)."""
        self._admit_score(token_ids)
        return await self._submit(list(token_ids), None, temperature)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in. A tied head may come under its own name or not at all."""
        if self._pending:
            raise RuntimeError("weights may not change while requests wait")
        own, required = self.model.state_dict(), dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in accounted(named_tensors, own, required):
                own[name].copy_(tensor)
        self.asleep = False
        self.version = version

    async def _submit(self, token_ids: list[int], sampling: Sampling | None, temperature: float) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._pending.append(Request(token_ids, sampling, temperature, EPISODE.get(), future))
        if self._drain is None or self._drain.done():
            self._changed = asyncio.Event()
            # In a context of its own: it works for all episodes, not for the one that woke it.
            self._drain = asyncio.create_task(self._run_pending(), context=contextvars.Context())
        self._state_changed()
        return await future

    def _state_changed(self) -> None:
        self._changed.set()

    def _give_up(self, episode: Hashable) -> None:
        for request in self._pending:
            if request.episode == episode:
                request.future.cancel()
        self._pending = [request for request in self._pending if request.episode != episode]

    async def _run_pending(self) -> None:
        while self._pending:
            await self._everyone_waits()
            batch = sorted(
                self._pending,
                key=lambda request: (request.sampling is None, request.sampling.key if request.sampling else ()),
            )
            self._pending = []
            batch = [request for request in batch if not request.future.done()]  # cancelled meanwhile
            for kind, run in ((True, self._generate), (False, self._score)):
                requests = [request for request in batch if (request.sampling is not None) == kind]
                for start in range(0, len(requests), self.max_batch):
                    _answer(requests[start : start + self.max_batch], run)

    async def _everyone_waits(self) -> None:
        """Return when no live episode can add a request before it gets an answer."""
        while True:
            waiting = {request.episode for request in self._pending}
            if all(episode in waiting or self._outside[episode] for episode in self._live):
                # An episode may ask from several coroutines at once: let those that are ready do so.
                before = len(self._pending)
                for _ in range(4):
                    await asyncio.sleep(0)
                if len(self._pending) == before:
                    return
            else:
                self._changed.clear()
                await self._changed.wait()

    @torch.inference_mode()
    def _generate(self, requests: list[Request]) -> list[Completion]:
        """Decode one batch. Rows: requests that still run, in key order."""
        prompts = list(
            dict.fromkeys(tuple(request.token_ids) for request in requests)
        )  # each distinct prompt is prefilled once
        cache = DynamicCache(config=self.model.config)
        logits, attention_mask = self._prefill(prompts, cache)
        row_of = {prompt: row for row, prompt in enumerate(prompts)}
        rows = torch.tensor([row_of[tuple(request.token_ids)] for request in requests], device=self.device)
        cache.batch_select_indices(rows)
        logits, attention_mask = logits[rows], attention_mask[rows]
        position = attention_mask.sum(1)

        budget = [
            min(request.sampling.max_new_tokens, self.max_context - len(request.token_ids)) for request in requests
        ]
        uniforms = [
            np.random.Generator(np.random.PCG64(seed_of(request.sampling.key))).random(n)
            for request, n in zip(requests, budget, strict=True)
        ]
        completions = [Completion([], [], "length", self.version) for _ in requests]
        heads: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in requests]
        running = list(range(len(requests)))  # request of each row
        padded = bool((attention_mask == 0).any())
        while running:
            logprobs = processed_logprobs(logits, [requests[i].sampling for i in running])
            draws = torch.tensor(
                [uniforms[i][len(completions[i].token_ids)] for i in running], dtype=torch.float64, device=self.device
            )
            greedy = torch.tensor([requests[i].sampling.temperature == 0 for i in running], device=self.device)
            tokens = torch.where(greedy, logprobs.argmax(-1), inverse_cdf(logprobs, draws))
            chosen = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
            if any(map(math.isnan, chosen)):
                raise ValueError("the model gives NaN for a probability: its weights are damaged")
            k = max(requests[i].sampling.top_logprobs for i in running)
            top = [values.cpu().numpy() for values in logprobs.topk(min(k + 2, logprobs.shape[-1]))] if k else None
            staying = []
            for row, (i, token, logprob) in enumerate(zip(running, tokens.tolist(), chosen, strict=True)):
                sampling, completion = requests[i].sampling, completions[i]
                completion.token_ids.append(token)
                completion.logprobs.append(logprob)
                if sampling.top_logprobs:
                    heads[i].append((top[1][row], top[0][row]))
                if token in sampling.stop_token_ids:
                    completion.finish_reason = "stop"
                elif len(completion.token_ids) < budget[i]:
                    staying.append(row)
            if not staying:
                break
            if len(staying) < len(running):  # finished rows leave the batch
                keep = torch.tensor(staying, device=self.device)
                cache.batch_select_indices(keep)
                tokens, attention_mask, position = tokens[keep], attention_mask[keep], position[keep]
                running = [running[row] for row in staying]
            attention_mask = torch.nn.functional.pad(attention_mask, (0, 1), value=1)
            logits = self.model(
                input_ids=tokens[:, None],
                attention_mask=attention_mask if padded else None,
                position_ids=position[:, None],
                use_cache=True,
                **{self._cache_name: cache},
            ).logits[:, -1]
            position = position + 1
        for request, completion, head in zip(requests, completions, heads, strict=True):
            if head:
                ids, logprobs = (np.stack(rows) for rows in zip(*head, strict=True))
                completion.topk_ids, completion.topk_logprobs = head_of(ids, logprobs, request.sampling.top_logprobs)
        return completions

    def _prefill(self, prompts: list[tuple[int, ...]], cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """Fill the cache with left-padded prompts. Returns next-token logits [B, V] and the attention mask [B, P]."""
        width = max(map(len, prompts))
        token_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        attention_mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, width - len(prompt) :] = 1
        attention_mask = attention_mask.to(self.device)
        outputs = self.model(
            input_ids=token_ids.to(self.device),
            attention_mask=attention_mask if bool((attention_mask == 0).any()) else None,
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
        )
        return outputs.logits[:, -1], attention_mask

    @torch.inference_mode()
    def _score(self, requests: list[Request]) -> list[np.ndarray]:
        """Forward passes over rows of similar length. Padding stands on the right, where causal attention hides it."""
        scores: dict[int, np.ndarray] = {}
        longest_first = sorted(range(len(requests)), key=lambda i: -len(requests[i].token_ids))
        while longest_first:
            width = len(requests[longest_first[0]].token_ids)
            rows = max(1, SCORE_TOKENS // width)
            batch, longest_first = longest_first[:rows], longest_first[rows:]
            token_ids = torch.zeros(len(batch), width, dtype=torch.int64)
            for row, i in enumerate(batch):
                token_ids[row, : len(requests[i].token_ids)] = torch.tensor(requests[i].token_ids)
            token_ids = token_ids.to(self.device)
            hidden = self.model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
            for row, i in enumerate(batch):
                last = len(requests[i].token_ids) - 1
                values = [torch.full((1,), torch.nan)]
                for inputs, labels in zip(
                    hidden[row, :last].split(256), token_ids[row, 1 : last + 1].split(256), strict=True
                ):
                    logits = self.model.get_output_embeddings()(inputs).float() / requests[i].temperature
                    values.append(logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0].cpu())
                scores[i] = torch.cat(values).numpy()
        return [scores[i] for i in range(len(requests))]


def _answer(requests: list[Request], run: Callable[[list[Request]], list]) -> None:
    try:
        results, error = run(requests), None
    except Exception as failed:
        results, error = [None] * len(requests), failed
    for request, result in zip(requests, results, strict=True):
        if request.future.done():  # Ctrl-C cancels whoever waits, in the middle of a batch
            continue
        if error is None:
            request.future.set_result(result)
        else:
            request.future.set_exception(error)


def processed_logprobs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Log-probabilities [B, V] float32 of the distribution that each row is to be sampled from: after temperature,
    top_k and top_p, normalized; ruled-out tokens have -inf."""
    temperature = torch.tensor([sampling.temperature or 1.0 for sampling in samplings], device=logits.device)
    logprobs = (logits.float() / temperature[:, None]).log_softmax(-1)
    if all(sampling.top_k < 1 and sampling.top_p >= 1 for sampling in samplings):
        return logprobs
    vocabulary = logits.shape[-1]
    values, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=logits.device)
    top_k = torch.tensor(
        [sampling.top_k if sampling.top_k > 0 else vocabulary for sampling in samplings], device=logits.device
    )
    values = values.masked_fill(rank >= top_k[:, None], -torch.inf).log_softmax(-1)
    top_p = torch.tensor([sampling.top_p for sampling in samplings], device=logits.device)
    mass_before = values.exp().cumsum(-1) - values.exp()
    values = values.masked_fill((mass_before >= top_p[:, None]) & (rank > 0), -torch.inf).log_softmax(-1)
    return torch.full_like(logprobs, -torch.inf).scatter(-1, order, values)


def inverse_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token a row, [B]: the first whose cumulative probability exceeds the row's uniform number in [0, 1).
    One number a token, drawn by the request's own generator, decides, whatever else is in the batch."""
    cumulative = logprobs.exp().double().cumsum(-1)
    threshold = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logprobs.shape[-1] - 1)
