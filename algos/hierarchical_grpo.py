"""Hierarchical GRPO: each role is compared with those who had the same job.

Equation. One source task gives G proposed problems, each played as one episode: a proposer's trace and the attempts of
several solvers. Trace i gets

    A_i = r_i - mean(r_j for j in peers(i))
    peers(i) = traces of the same agent in the same episode    if that agent is in episode_agents (the solvers)
               traces of the same agent in the whole group     else (the proposers)

Solvers of different problems do not meet, since the problems differ in difficulty; proposer and solver do not meet, since
their rewards measure different things. The estimator itself is GRPO's (arXiv:2402.03300, without the division).

Example. One problem, solved by three solvers with rewards 1, 1, 0: their mean is 2/3, the advantages are 1/3, 1/3, -2/3.

When it helps: in proposer-solver environments. A trace without peers gets 0, so solvers need a second attempt at the same
problem and proposers a --group-size above 1.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from algos.advantage import GroupRelativeConfig, baseline, shaped_rewards
from algos.anchor import Anchored
from traces import Episode, Trace, assign_advantages, trainable_traces


@dataclass
class HierarchicalGRPOConfig(GroupRelativeConfig):
    """GRPO for proposer-solver environments."""

    episode_agents: tuple[str, ...] = ("solver",)
    """agents that are compared within one episode, that is one proposed problem"""

    def check(self, source: Any, run: Any) -> list[str]:
        """Refuse an environment without proposed problems, and agents that it does not have."""
        env = type(source.env).__name__
        if not getattr(source.env, "proposer_solver", False):
            raise ValueError(f"--algo hierarchical_grpo: {env} is no proposer-solver environment; use grpo")
        for agent in self.episode_agents:
            if agent not in source.env.agents:
                raise ValueError(f"--episode-agents {agent}: {env} has the agents {', '.join(source.env.agents)}")
        return super().check(source, run)


class HierarchicalGRPO(Anchored):
    """Advantage = reward - mean reward of the trace's peers."""

    Config = HierarchicalGRPOConfig
    action_loss = "rl"

    async def score_group(self, episodes: Sequence[Episode]) -> None:
        """Compare solvers within an episode, proposers within the group."""
        peers: dict[tuple, list[Trace]] = defaultdict(list)
        for episode in episodes:
            for trace in trainable_traces([episode]):
                within = episode.id if trace.agent in self.config.episode_agents else None
                peers[trace.agent, within].append(trace)
        for traces in peers.values():
            rewards = shaped_rewards(traces, self.config)
            mean = baseline(traces, rewards, self.config)
            for trace, reward in zip(traces, rewards, strict=True):
                assign_advantages(trace, reward - mean)
