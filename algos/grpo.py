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
from typing import Literal

from algos.advantage import GroupRelativeConfig, baseline, shaped_rewards, weigh_by_prompt
from algos.anchor import Anchored
from traces import Episode, assign_advantages, trainable_traces


@dataclass
class GRPOConfig(GroupRelativeConfig):
    """Group-relative policy optimization."""

    loss_aggregation: Literal["token", "prompt"] = "token"
    """what weighs the same in the rl loss: every token, or every prompt however long its rollouts are"""


class GRPO(Anchored):
    """Advantage = reward - mean reward of the group."""

    Config = GRPOConfig
    action_loss = "rl"

    async def score_group(self, episodes: Sequence[Episode]) -> None:
        """Compare the usable traces of one task with each other."""
        traces = trainable_traces(episodes)
        rewards = shaped_rewards(traces, self.config)
        mean = baseline(traces, rewards, self.config)
        for trace, reward in zip(traces, rewards, strict=True):
            assign_advantages(trace, reward - mean)
        if self.config.loss_aggregation == "prompt":
            weigh_by_prompt(traces)
