"""What a sampler is: token ids in, sampled token ids with log-probabilities out, and new weights whenever they come.

Engines differ in how they batch, not in what they give: `generate` samples exactly as `Sampling` says and nothing a model
folder's generation_config says, `score` gives the log-probabilities of given tokens, and every number is that of the
distribution that was sampled from.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to sample one completion.

    temperature 0 is greedy. top_k -1 and top_p 1 leave the distribution whole. A completion ends with the first of
    stop_token_ids (kept as its last token) or after max_new_tokens. top_logprobs: the size K of the head to return with
    each sampled token. key orders requests and seeds this one's randomness: (run seed, train or eval, step, group, rollout, agent, turn).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0
    key: tuple[int, ...] = ()


@dataclass
class Completion:
    """What was sampled: C token ids, and log-probabilities under the distribution that was sampled from, that is after
    temperature, top_k and top_p (at temperature 0: of the distribution at temperature 1).

    finish_reason: "stop" (ends with a stop token) or "length". version: of the weights that sampled it. topk_ids and
    topk_logprobs [C, K]: the head of each distribution (`head_of`).
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int
    topk_ids: np.ndarray | None = None
    topk_logprobs: np.ndarray | None = None


def head_of(ids: np.ndarray, logprobs: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k most probable tokens of each distribution, best first: (ids [C, k], log-probs [C, k]).

    ids, logprobs [C, n]: candidates in any order, at least k + 1 of them most probable (a server may add the sampled one).
    Candidates that tie with the (k+1)th are left out (id -1, log-prob -inf): which of them a sampler would list is chance,
    and a head must not depend on it, nor on what was sampled.
    """
    order = np.argsort(-logprobs, axis=1, kind="stable")
    ids, logprobs = np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1)
    if ids.shape[1] > k:
        tied = logprobs[:, :k] <= logprobs[:, k : k + 1]
        return np.where(tied, -1, ids[:, :k]), np.where(tied, -np.inf, logprobs[:, :k])
    missing = ((0, 0), (0, k - ids.shape[1]))  # the vocabulary is smaller than the head
    return np.pad(ids, missing, constant_values=-1), np.pad(logprobs, missing, constant_values=-np.inf)


def seed_of(key: tuple[int, ...]) -> int:
    """A 64-bit seed from a request's key: unlike `hash`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def accounted(
    named_tensors: Iterable[tuple[str, Tensor]], known: Iterable[str], required: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Pass named weights through. Raises ValueError for a name that is not `known`, and at the end for a `required` one that
    did not come: a model with a stale tensor samples nonsense without an error."""
    known, missing = set(known), set(required)
    for name, tensor in named_tensors:
        if name not in known:
            raise ValueError(f"weight {name} is unknown to the engine's model")
        missing.discard(name)
        yield name, tensor
    if missing:
        raise ValueError(f"weights that did not arrive: {', '.join(sorted(missing))}")


EPISODE: ContextVar[Hashable] = ContextVar("episode", default=None)


class Engine:
    """Base of all engines. All coroutines of a run share one engine; any number of them may wait for it at once."""

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context  # tokens of prompt and completion together
        self.version = 0  # optimizer steps behind the weights that it holds
        self.asleep = False
        self.memory_share: float | None = None  # of a GPU's memory while it samples, where it takes one
        self._live: Counter[Hashable] = Counter()
        self._outside: Counter[Hashable] = Counter()

    def check(self, sampling: Sampling) -> None:
        """Raise ValueError, naming the option, for a sampling that the engine can not do exactly."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion. Raises ValueError where the prompt leaves no room in the context."""
        raise TypeError(f"{type(self).__name__} does not sample")

    async def complete(
        self, prompt_ids: Sequence[int], sampling: Sampling, messages: Sequence[dict], tools: list[dict] | None
    ) -> Completion:
        """`generate`, for engines that may have to be asked by messages: the conversation that prompt_ids renders."""
        return await self.generate(prompt_ids, sampling)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Log-probability of each token given those before it, [T] float32; NaN at position 0."""
        raise TypeError(f"{type(self).__name__} does not score")

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over new weights and be awake with them. Raises ValueError for a missing or an unknown name, and RuntimeError
        while requests wait: none of them crosses a weight update."""
        raise TypeError(f"{type(self).__name__} holds frozen weights")

    def sleep(self) -> None:
        """Give the device to the trainer. Requests are refused until `wake_up` or `load_weights`."""
        self.asleep = True

    def wake_up(self) -> None:
        """Take the device back with the weights as they were."""
        self.asleep = False

    def close(self) -> None:
        """Release everything."""

    @contextlib.contextmanager
    def playing(self, episode: Hashable) -> Iterator[None]:
        """Say that an episode is live: a batching engine may wait for its next request."""
        token = EPISODE.set(episode)
        self._live[episode] += 1
        try:
            yield
        finally:
            EPISODE.reset(token)
            self._live[episode] -= 1
            self._live += Counter()  # drops what is at zero
            if episode not in self._live:
                self._give_up(episode)
            self._state_changed()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Say that the episode waits for something outside (a tool, a server), so that nobody waits for it meanwhile."""
        episode = EPISODE.get()
        self._outside[episode] += 1
        self._state_changed()
        try:
            yield
        finally:
            self._outside[episode] -= 1
            self._outside += Counter()

    def _state_changed(self) -> None:
        """Called whenever an episode ends or goes outside."""

    def _give_up(self, episode: Hashable) -> None:
        """Cancel what an episode that ended still asks for: it may have failed while another of its agents was speaking, and
        the engine could not change its weights while that request waits."""

    def _admit(self, prompt_ids: Sequence[int]) -> None:
        """Raise for a request that can not be sampled now."""
        self._require_awake()
        if not 0 < len(prompt_ids) < self.max_context:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens does not fit a context of {self.max_context}: raise --seq-len or shorten the prompt"
            )

    def _admit_score(self, token_ids: Sequence[int]) -> None:
        """Raise for tokens that can not be scored now."""
        self._require_awake()
        if not 0 < len(token_ids) <= self.max_context:
            raise ValueError(
                f"{len(token_ids)} tokens to score do not fit a context of {self.max_context}: raise --seq-len"
            )

    def _require_awake(self) -> None:
        if self.asleep:
            raise RuntimeError("the engine sleeps while the trainer works: load_weights() or wake_up() first")
