"""MaxRL: reward minus the group's mean, divided by that mean.

Equation. A task is played G times; rollout i earns reward r_i. Every sampled token t of rollout i gets

    A_{i,t} = (r_i - mean(r_1, ..., r_G)) / mean(r_1, ..., r_G),    0 where the mean is not positive

For binary rewards the mean estimates the probability p of solving the task, and the gradient is unbiased for the
maximum-likelihood objective log p, truncated after its first G terms (arXiv:2602.02710).

Example. Rewards 1, 0, 0.5: the mean is 0.5, the advantages are 1, -1, 0.

When it helps: where many tasks are rarely solved, since a task counts like 1/p. It is derived for binary rewards; with
graded ones the formula is taken as it stands, and a reward that can be negative has no probability to stand for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from algos.advantage import GroupRelativeConfig, baseline, shaped_rewards
from algos.anchor import Anchored
from traces import Episode, assign_advantages, trainable_traces


@dataclass
class MaxRLConfig(GroupRelativeConfig):
    """Maximum-likelihood reinforcement learning."""


class MaxRL(Anchored):
    """Advantage = (reward - mean) / mean reward of the group."""

    Config = MaxRLConfig
    action_loss = "rl"

    async def score_group(self, episodes: Sequence[Episode]) -> None:
        """Compare the usable traces of one task with each other."""
        traces = trainable_traces(episodes)
        rewards = shaped_rewards(traces, self.config)
        mean = baseline(traces, rewards, self.config)
        for trace, reward in zip(traces, rewards, strict=True):
            # A negative mean would turn every sign around, and rewards [1, -1] have a mean of 0 but differ.
            assign_advantages(trace, (reward - mean) / mean if mean > 0 else 0.0)
