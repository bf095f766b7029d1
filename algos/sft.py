"""SFT: hard distillation. A frozen model plays the environment, and the policy imitates its tokens.

Equation. For every token y_t that the frozen model sampled

    loss_t = -log pi(y_t | y_<t)

averaged over all of them in the ce component: the forward KL to the model that samples, from one sample (sequence-level
knowledge distillation, arXiv:1606.07947).

Example. The policy gives the tokens log-probs -0.5, -1, -1.5: the losses are 0.5, 1, 1.5, the mean is 1.

When it helps: as a start, before rl or opd, where the policy can not yet do what earns a reward, or where the other model
gives text but no log-probs. The policy learns on states that the other model gets into, not on its own. Rewards are
recorded and not used: nothing is filtered by them.
"""

from dataclasses import dataclass, field
from typing import Any

from algos.base import Algorithm, AlgorithmConfig
from frozen import FrozenModel, require_frozen


@dataclass
class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning on what a frozen model samples."""

    sample_from: FrozenModel = field(default_factory=FrozenModel)
    """the model that plays the rollouts"""

    def check(self, source: Any, run: Any) -> list[str]:
        """Refuse a missing model, and the policy as its own model."""
        why = "cross-entropy on the policy's own tokens is no target; name a frozen model"
        require_frozen("sft", "sample-from", "the model that it imitates", self.sample_from, why)
        return []

    def frozen_models(self) -> list[tuple[str, FrozenModel, str]]:
        """The model that samples."""
        return [("sample-from", self.sample_from, "sample")]


class SFT(Algorithm):
    """No credit: every sampled token weighs 1 in the ce component."""

    Config = SFTConfig
    action_loss = "ce"

    async def setup(self) -> None:
        """Connect to the model that samples."""
        self.sampler = self.connect(self.config.sample_from)

    async def close(self) -> None:
        """Leave it."""
        if self.sampler is not None:
            self.sampler.close()
