"""The anchor: what keeps an rl policy near a reference, beside the reward. Every rl algorithm takes one.

Equation. A frozen reference reads each rollout, and its sampled tokens get a signal in the ref_kl component beside their
advantage in the rl component:

    L = sum_t L_rl,t / N_rl  -  beta * sum_t sg(log pi_ref(y_t) - log pi(y_t)) * pi/mu / N_ref_kl

Both sums run over the same sampled tokens and their gradients add up. In expectation the second is beta times the gradient of
KL(pi || pi_ref), the penalty that RLHF puts on leaving the start (arXiv:1909.08593). beta is --reference-weight.

Example. Log-probs -1 under the reference and -0.2 under the policy: the signal is -0.8, so at beta 0.1 the token is pushed down
as an advantage of -0.08 would.

When it helps: where reward alone runs away: self-play that cycles or collapses, long runs, rewards that can be gamed. The
reference is usually the model that the run began from, served beside. With an anchor a group of equal rewards still teaches,
so it is trained on and not replaced. No reference is named by default.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from algos.base import Algorithm, AlgorithmConfig
from algos.reference import check_temperature, score_trace
from frozen import FrozenModel, require_frozen
from traces import Episode, assign_ref_kl_weights, trainable_traces


@dataclass
class AnchoredConfig(AlgorithmConfig):
    """The anchor's knobs, which every rl algorithm has."""

    reference: FrozenModel = field(default_factory=FrozenModel)
    """a served model that the policy is held to; none by default"""
    reference_weight: float | None = None
    """weight of the KL to the reference, e.g. 0.1"""

    @property
    def anchored(self) -> bool:
        """Whether there is a reference."""
        return self.reference != FrozenModel()

    def check(self, source: Any, run: Any) -> list[str]:
        """Refuse half an anchor, a weight that is none, and a temperature that the reference can not score at."""
        if not self.anchored:
            if self.reference_weight is not None:
                raise ValueError(
                    f"--reference-weight {self.reference_weight:g}: needs --reference.name and --reference.base-url, the model to stay near"
                )
            return []
        why = "the KL of the policy to itself is 0 everywhere; serve the model that it starts from"
        require_frozen("--reference-weight", "reference", "the reference", self.reference, why)
        weight = self.reference_weight
        if weight is None or not 0 < weight < float("inf"):
            raise ValueError(f"--reference-weight {weight}: must be a positive number beside --reference.name")
        check_temperature("--reference.name", run)
        return []

    def frozen_models(self) -> list[tuple[str, FrozenModel, str]]:
        """The reference."""
        return [("reference", self.reference, "score")] if self.anchored else []


class Anchored(Algorithm):
    """Base of the rl algorithms: rl on the sampled tokens and, where a reference is named, ref_kl on the same ones."""

    Config = AnchoredConfig
    action_loss = "rl"

    reference: Any = None

    async def setup(self) -> None:
        """Connect to the reference."""
        if self.config.anchored:
            self.reference = self.connect(self.config.reference)

    async def close(self) -> None:
        """Leave the reference."""
        if self.reference is not None:
            self.reference.close()

    async def finalize_episode(self, episode: Episode) -> None:
        """What the algorithm does, and the reference's log-probs."""
        await super().finalize_episode(episode)
        if self.reference is not None:
            with self.policy.outside():
                for trace in trainable_traces([episode]):
                    await score_trace(self.reference, trace)

    async def finalize_group(self, episodes: Sequence[Episode]) -> None:
        """What the algorithm does, and the anchor's weight."""
        await super().finalize_group(episodes)
        if self.reference is not None:
            for trace in trainable_traces(episodes):
                assign_ref_kl_weights(trace, self.config.reference_weight)
