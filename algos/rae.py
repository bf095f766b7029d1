"""RAE: reward minus a running mean of the same agent's own rewards (role-conditioned advantage estimation).

Equation. b_a is the baseline of agent a, 0 at first. For every trace in the order in which groups were dealt

    A_i = r_i - b_a
    b_a <- decay * b_a + (1 - decay) * r_i

The baseline is used before it learns of r_i: it must not depend on the reward that it is subtracted from
(SPIRAL, arXiv:2506.24119).

Example. With decay 0.5 one agent earns rewards 1, 1, 0: its baseline is 0, 0.5, 0.75, the advantages are 1, 0.5, -0.75.

When it helps: self-play. In a zero-sum game the rewards of an episode sum to 0 whatever the policy does, so a group's mean
says nothing, and an edge of one side (the first move) would be credited to its tokens for ever. Groups of one are fine.
With a single agent this is REINFORCE with a running baseline. The baselines are part of the checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from algos.anchor import Anchored, AnchoredConfig
from traces import Episode, assign_advantages, trainable_traces


@dataclass
class RAEConfig(AnchoredConfig):
    """Role-conditioned advantage estimation."""

    decay: float = 0.95
    """how much of an agent's baseline is kept at each of its rewards; it warms up over some 1/(1 - decay) of them"""

    def check(self, source: Any, run: Any) -> list[str]:
        """Refuse a decay with which the baseline would never learn or run away."""
        if not 0 <= self.decay < 1:
            raise ValueError(f"--decay {self.decay}: must lie in [0, 1)")
        return super().check(source, run)


class RAE(Anchored):
    """Advantage = reward - running mean of the agent's own rewards."""

    Config = RAEConfig
    action_loss = "rl"

    def __init__(self, config: RAEConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.baselines: dict[str, float] = {}

    async def score_group(self, episodes: Sequence[Episode]) -> None:
        """Credit trace after trace; the order matters."""
        decay = self.config.decay
        for trace in trainable_traces(episodes):
            baseline = self.baselines.get(trace.agent, 0.0)
            assign_advantages(trace, trace.reward - baseline)
            self.baselines[trace.agent] = decay * baseline + (1 - decay) * trace.reward

    def state_dict(self) -> dict[str, Any]:
        """The baselines by agent."""
        return {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with these baselines."""
        self.baselines = dict(state["baselines"])
