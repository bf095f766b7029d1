"""ECHO: GRPO on what the policy says, and cross-entropy on what the environment answers.

Equation. Sampled tokens get GRPO's advantage in the rl component. An observation token of role k (a tool's result, a user's
feedback), once the policy has said something, weighs alpha_k in the ce component:

    L = sum_t L_rl,t / N_rl  +  sum_t alpha_role(t) * -log pi(y_t | y_<t) / N_ce

N_ce counts the tokens, so alpha scales the term; only message bodies count, no template scaffold.

Example. Tool tokens with log-probs -1, -2, -3 at alpha 0.1: the losses are 0.1, 0.2, 0.3, the ce term is 0.2.

When it helps: in multi-turn environments whose answers are worth predicting, and where a group without any success would
otherwise teach nothing: it still carries ce. The paper's weight is 0.05; the default here is 0.1, for tools alone.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from algos.anchor import Anchored
from algos.grpo import GRPO, GRPOConfig
from algos.token_filter import keep_masks, load_filter
from traces import Episode, trainable_traces

ROLES = ("system", "user", "assistant", "tool")


@dataclass
class EchoConfig(GRPOConfig):
    """GRPO and a world-model loss on observations."""

    roles: dict[str, float] = field(default_factory=lambda: {"tool": 0.1})
    """weight of observation tokens by message role; giving one replaces the whole table"""
    filter: str | None = None
    """module.function that narrows the choice: (trace, **kwargs) -> one keep-mask for each training branch"""
    filter_kwargs: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the filter"""

    def check(self, source: Any, run: Any) -> list[str]:
        """Refuse roles that do not exist, weights that are none, and a filter that can not be imported."""
        if not self.roles:
            raise ValueError("--roles: echo needs at least one role; without any it is grpo")
        for role, alpha in self.roles.items():
            if role not in ROLES:
                raise ValueError(f"--roles {role}={alpha}: there is no such role; choose among {', '.join(ROLES)}")
            if not 0 <= alpha < float("inf"):
                raise ValueError(f"--roles {role}={alpha}: must be a finite number, at least 0")
        load_filter(self.filter)
        return super().check(source, run)


class Echo(Anchored):
    """GRPO, plus ce weights on the environment's tokens."""

    Config = EchoConfig
    action_loss = "rl"
    score_group = GRPO.score_group  # the rl half is GRPO's as it stands

    def __init__(self, config: EchoConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.filter = load_filter(config.filter)

    async def score_episode(self, episode: Episode) -> None:
        """Weigh the observation tokens that the role table selects and the filter keeps."""
        for trace in trainable_traces([episode]):
            masks = keep_masks(self.filter, trace, self.config.filter_kwargs, self.renderer)
            for branch, keep in zip(trace.training_branches(), masks, strict=True):
                weights = np.zeros(len(branch))
                for segment in branch.segments:
                    weights[segment.start : segment.stop] = self.config.roles.get(segment.role, 0.0)
                # The first prompt is the task, and in a later branch it repeats what an earlier one has trained on.
                answers = np.arange(len(branch)) > branch.sampled.argmax()
                weights[~(answers & branch.is_content & ~branch.sampled & keep)] = 0.0
                branch.ce_weights = weights if weights.any() else None
