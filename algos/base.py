"""What an algorithm is: two hooks that write per-token credit, and the loss component that consumes it.

`score_episode` runs when one episode has arrived, on the rank that played it; calls to a model belong here.
`score_group` runs when all episodes of a task have arrived, in deal order; credit that compares rollouts belongs here.
Both write streams through `assign_advantages` and its siblings in `traces`; everything after them (routing, gates,
packing, loss) is the same for every algorithm and never asks which one it was.

A new algorithm is one file beside this one and one line in `algos/__init__.py`. This is all of it:

    class LeaveOneOut(Algorithm):
        async def score_group(self, episodes):
            traces = trainable_traces(episodes)
            total, n = sum(trace.reward for trace in traces), len(traces)
            for trace in traces:
                assign_advantages(trace, trace.reward - (total - trace.reward) / (n - 1) if n > 1 else 0.0)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from traces import ActionLoss, Episode, route_actions, trainable_traces


@dataclass
class AlgorithmConfig:
    """The knobs of an algorithm; they stand at the top level of the command line."""

    def check(self, source: Any, run: Any) -> list[str]:
        """Raise ValueError for what can not work with this source (`config.Source`) in this run (`config.Config`), naming
        the option to change; return warnings for what will work badly."""
        return []

    def frozen_models(self) -> list[tuple[str, "FrozenModel", Literal["score", "sample"]]]:
        """(option, model, what it must do) of the frozen models that the algorithm uses."""
        return []


@dataclass
class FrozenModel:
    """A model that never changes and is served elsewhere, by an OpenAI-compatible endpoint."""

    name: str = ""
    """as the endpoint calls it"""
    base_url: str = ""
    """of the endpoint, e.g. http://localhost:8001/v1; several, separated by commas, share the work"""
    api_key_env: str = "OPENAI_API_KEY"
    """environment variable that holds the API key"""
    timeout: float = 300.0
    """seconds for a request, with its retries; a try without an answer is given up after half of them"""
    retries: int = 5
    """tries again after a refusal (429), a server error, a broken connection or no answer"""
    max_concurrent: int = 64
    """requests at once"""


class Algorithm:
    """Base of all algorithms.

    policy: the engine that holds the live policy; score with it, never sample. renderer: the one that rollouts are
    rendered with. connect: gives the engine of a frozen model. sampler: the engine that plays the rollouts where the
    policy does not (set in `setup`), else None.
    """

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    action_loss: ClassVar[ActionLoss] = "rl"

    def __init__(
        self,
        config: AlgorithmConfig,
        policy: Any = None,
        renderer: Any = None,
        connect: Callable[[FrozenModel], Any] | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.renderer = renderer
        self.connect = connect
        self.sampler: Any = None

    async def setup(self) -> None:
        """Run once before the first rollout: connect a teacher, build a renderer."""

    async def close(self) -> None:
        """Run once after the last rollout: release what `setup` opened."""

    async def score_episode(self, episode: Episode) -> None:
        """Write streams that need this episode alone."""

    async def score_group(self, episodes: Sequence[Episode]) -> None:
        """Write streams that compare the episodes of one task."""

    async def finalize_episode(self, episode: Episode) -> None:
        """`score_episode`, but for episodes in which there is nothing to train."""
        if trainable_traces([episode]):
            await self.score_episode(episode)

    async def finalize_group(self, episodes: Sequence[Episode]) -> None:
        """`score_group`, unless nothing in the group can be trained; then route the sampled tokens to `action_loss`."""
        traces = trainable_traces(episodes)
        if traces:
            await self.score_group(episodes)
        for trace in traces:
            route_actions(trace, self.action_loss)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know (JSON types)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


def require_non_negative(config: AlgorithmConfig, *names: str) -> None:
    """Raise ValueError for the first of these knobs that is negative or no finite number."""
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be a finite number, at least 0")


def require_frozen(algo: str, flag: str, role: str, model: Any, why_not_policy: str) -> None:
    """Raise ValueError unless `model` is a `FrozenModel` with a name and an address. role: what the model does for `algo`."""
    if model == "policy" or getattr(model, "name", None) == "policy":
        raise ValueError(f"--{flag} policy: {why_not_policy}")
    if not isinstance(model, FrozenModel) or not model.base_url:
        raise ValueError(f"{algo} needs --{flag}.base-url: {role} is served elsewhere")
    for url in model.base_url.split(","):
        if not url.strip().startswith(("http://", "https://")):
            raise ValueError(f"--{flag}.base-url {url}: must begin with http:// or https://")
        try:
            parts = urlsplit(url.strip())
            whole = bool(parts.hostname) and parts.port != 0  # a port that is no number up to 65535 raises
        except ValueError:
            whole = False
        if not whole:
            raise ValueError(f"--{flag}.base-url {url}: is no address of a server, like http://localhost:8001/v1")
    if not (math.isfinite(model.timeout) and model.timeout > 0):
        raise ValueError(f"--{flag}.timeout {model.timeout}: must be a positive number")
    for knob, least in (("retries", 0), ("max_concurrent", 1)):
        if getattr(model, knob) < least:
            raise ValueError(f"--{flag}.{knob.replace('_', '-')} {getattr(model, knob)}: must be at least {least}")
    if not model.name:
        raise ValueError(f"{algo} needs --{flag}.name: what the endpoint {model.base_url} calls {role}")
