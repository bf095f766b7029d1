"""GRPO: reward minus the group's mean.

Equation. A task is played G times; rollout i earns reward r_i. Every sampled token t of rollout i gets

    A_{i,t} = r_i - mean(r_1, ..., r_G)

There is no division by the group's standard deviation: it would weight tasks by how nearly solved or hopeless they are
(Dr. GRPO, arXiv:2503.20783; GRPO itself: DeepSeekMath, arXiv:2402.03300).

Example. Rewards 1, 0, 0.5: the mean is 0.5, the advantages are 0.5, -0.5, 0.

When it helps: the default wherever an environment grades whole answers and a task can be tried several times. A group
whose rewards are all equal says nothing and gets exact zeros, so the filter drops it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from algos.base import Algorithm, AlgorithmConfig
from traces import Episode, assign_advantages, trainable_traces


def centered(rewards: Sequence[float]) -> list[float]:
    """r_i - mean(r). Equal rewards give exact zeros, although mean([0.1] * 3) is not 0.1 in floating point."""
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


@dataclass
class GRPOConfig(AlgorithmConfig):
    """Group-relative policy optimization."""

    def check(self, source: Any, run: Any) -> list[str]:
        """Warn where no group has a second rollout to compare with."""
        if source.group_size == 1:
            return [
                "--group-size 1: a group of one equals its own mean, so every advantage is 0 and nothing is learned"
            ]
        return []


class GRPO(Algorithm):
    """Advantage = reward - mean reward of the group."""

    Config = GRPOConfig
    action_loss = "rl"

    async def score_group(self, episodes: Sequence[Episode]) -> None:
        """Compare the usable traces of one task with each other."""
        traces = trainable_traces(episodes)
        for trace, advantage in zip(traces, centered([trace.reward for trace in traces]), strict=True):
            assign_advantages(trace, advantage)
