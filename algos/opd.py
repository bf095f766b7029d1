"""OPD: on-policy distillation. The policy samples, and a teacher says of every token what it thinks of it.

Equation. The teacher reads the rollout as the policy wrote it. Every sampled token y_t gets, in the ref_kl component,

    signal_t = log pi_teacher(y_t | y_<t) - log pi(y_t | y_<t)

whose mean over samples is minus the reverse KL, KL(pi || pi_teacher), so following it brings the policy to the teacher
(thinkingmachines.ai/blog/on-policy-distillation; earlier MiniLLM, arXiv:2306.08543, and GKD, arXiv:2306.13649).

Example. Teacher log-probs -0.5, -1, -2 against the policy's -1.5, -1, -0.5: signals 1, 0, -1.5.

When it helps: where a stronger model with the same tokenizer is at hand. Every token gets a signal, so a step teaches more
than one reward a rollout does; the policy learns on the states that it gets into itself, which `sft` can not offer. No
reward is used, though the environment's is recorded. Scoring costs a prefill of the teacher for each rollout.
"""

from dataclasses import dataclass, field
from typing import Any

from algos.base import Algorithm, AlgorithmConfig
from algos.reference import check_temperature, score_trace
from frozen import FrozenModel, require_frozen
from traces import Episode, trainable_traces


@dataclass
class OPDConfig(AlgorithmConfig):
    """On-policy distillation from a frozen teacher."""

    teacher: FrozenModel = field(default_factory=FrozenModel)
    """the model whose log-probs are the target"""

    def check(self, source: Any, run: Any) -> list[str]:
        """Refuse a missing teacher, the policy as its own teacher, and a temperature that the teacher can not score at."""
        why = "the policy can not be its own teacher, the KL would be 0 everywhere; see opsd"
        require_frozen("opd", "teacher", "the teacher", self.teacher, why)
        check_temperature("opd", run)
        if self.teacher.name == run.model:
            return [f"--teacher.name {self.teacher.name} is the model that the policy starts from: the KL begins at 0"]
        return []

    def frozen_models(self) -> list[tuple[str, FrozenModel, str]]:
        """The teacher."""
        return [("teacher", self.teacher, "score")]


class OPD(Algorithm):
    """Reference log-probs = the teacher's, in the policy's own context."""

    Config = OPDConfig
    action_loss = "ref_kl"

    teacher: Any = None

    async def setup(self) -> None:
        """Connect to the teacher."""
        self.teacher = self.connect(self.config.teacher)

    async def close(self) -> None:
        """Leave the teacher."""
        if self.teacher is not None:
            self.teacher.close()

    async def score_episode(self, episode: Episode) -> None:
        """Ask the teacher for its log-probs."""
        with self.policy.outside():  # the teacher is no part of the policy's engine, which need not wait for it
            for trace in trainable_traces([episode]):
                await score_trace(self.teacher, trace)
