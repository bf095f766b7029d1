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

from frozen import FrozenModel
from traces import ActionLoss, Episode, route_actions, trainable_traces


@dataclass
class AlgorithmConfig:
    """The knobs of an algorithm; they stand at the top level of the command line."""

    def check(self, source: Any, run: Any) -> list[str]:
        """Raise ValueError for what can not work with this source (`config.Source`) in this run (`config.Config`), naming
        the option to change; return warnings for what will work badly."""
        return []

    def frozen_models(self) -> list[tuple[str, FrozenModel, Literal["score", "sample"]]]:
        """(option, model, what it must do) of the frozen models that the algorithm uses."""
        return []


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
