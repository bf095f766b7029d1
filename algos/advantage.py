"""What the group-relative algorithms share: the baseline, shaping by length, and the weight of a prompt in the loss.

    r_i          reward of rollout i, one of G of the same task
    s_i          r_i - p * (w_out out_i/max out + w_in in_i/max in + w_turns turns_i/max turns),  p = mean(r)
    b            mean(s), or sum_i L_i s_i / sum_i L_i with L_i the sampled tokens of rollout i
    A_i          s_i - b in GRPO

The penalty is scaled by p, the pass rate of the raw rewards: a task that is hardly ever solved is not made shorter. Each
count is divided by the group's own maximum, so the weights need no units; a term whose maximum is 0 is left out.

What counts as output and input of a rollout follows from its requests (`Branch.turns`). Output is what was sampled. Input
is what a request showed the model for the first time: its prompt without what stood in the branch before it.
*linear* counts a prefix that two branches share once; *linear-subagent* counts every branch by itself, and multiplies
what a sub-agent read and wrote by `subagent_token_weight`.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from algos.anchor import AnchoredConfig
from algos.base import require_non_negative
from traces import Branch, Edge, Trace, assign_rl_weights

WEIGHTS = ("num_output_tokens_weight", "num_input_tokens_weight", "num_turns_weight", "subagent_token_weight")
# What these edges lead to, from a sub-agent's call, still is that sub-agent. A return, a cancellation or a message is not.
INHERITING = ("subagent_call", "continuation", "compaction_attempt", "compaction")


@dataclass
class GroupRelativeConfig(AnchoredConfig):
    """The knobs of every algorithm whose baseline is the mean of a group."""

    length_penalty: Literal["none", "linear", "linear-subagent"] = "none"
    """lower the rewards of long rollouts, in proportion to the pass rate"""
    num_output_tokens_weight: float = 0.25
    """of sampled tokens in the length penalty"""
    num_input_tokens_weight: float = 0.1
    """of prompt and observation tokens in the length penalty"""
    num_turns_weight: float = 0.1
    """of requests to the model in the length penalty"""
    subagent_token_weight: float = 0.0
    """what a token of a sub-agent counts in linear-subagent; 1: fully"""
    length_weighted_baseline: bool = False
    """weigh rewards by sampled tokens in the baseline, so that advantages sum to 0 over the group's tokens"""

    def check(self, source: Any, run: Any) -> list[str]:
        """Refuse weights that are no weights; warn of groups of one and of weights that have no effect."""
        require_non_negative(self, *WEIGHTS)
        used = {"none": (), "linear": WEIGHTS[:3], "linear-subagent": WEIGHTS}[self.length_penalty]
        warnings = super().check(source, run) + [
            f"--{name.replace('_', '-')} {getattr(self, name):g} has no effect with --length-penalty {self.length_penalty}"
            for name in WEIGHTS
            if name not in used and getattr(self, name) != getattr(GroupRelativeConfig, name)
        ]
        if source.group_size == 1:
            warnings.append(
                "--group-size 1: a group of one equals its own mean, so every advantage is 0 and nothing is learned"
            )
        return warnings


def baseline(traces: Sequence[Trace], rewards: Sequence[float], config: GroupRelativeConfig) -> float:
    """b: the mean of the group's rewards, by rollout or by sampled token.

    Where all rewards are equal it is that very number: fmean([0.1] * 3) is not 0.1 in floating point, and an advantage
    that should be 0 must be exactly 0 for the filter to drop it.
    """
    if len(set(rewards)) <= 1:
        return rewards[0] if rewards else 0.0
    return fmean(rewards, [trace.num_sampled for trace in traces] if config.length_weighted_baseline else None)


def shaped_rewards(traces: Sequence[Trace], config: GroupRelativeConfig) -> list[float]:
    """s: the rewards of a group after the length penalty."""
    rewards = [trace.reward for trace in traces]
    if config.length_penalty == "none" or not rewards:
        return rewards
    pass_rate = fmean(rewards)
    outputs, inputs = zip(*[token_counts(trace, config) for trace in traces], strict=True)
    terms = [
        (config.num_output_tokens_weight, outputs),
        (config.num_input_tokens_weight, inputs),
        (config.num_turns_weight, [trace.num_turns for trace in traces]),
    ]
    terms = [(weight / max(counts), counts) for weight, counts in terms if max(counts) > 0]
    return [
        reward - pass_rate * sum(weight * counts[i] for weight, counts in terms) for i, reward in enumerate(rewards)
    ]


def token_counts(trace: Trace, config: GroupRelativeConfig) -> tuple[float, float]:
    """(output, input) tokens of a trace as its length penalty counts them."""
    alone = config.length_penalty == "linear-subagent"
    members = subagent_calls(trace.edges) if alone else ()
    outputs = inputs = 0.0
    for i, branch in enumerate(trace.branches):
        weight = config.subagent_token_weight if branch.call in members else 1.0
        outputs += weight * sum(turn.completion_len for turn in branch.turns)
        inputs += weight * (new_input_tokens(branch) - (0 if alone else shared_prefix(branch, trace.branches[:i])))
    return outputs, inputs


def new_input_tokens(branch: Branch) -> int:
    """Prompt tokens that some request of the branch was the first to show."""
    seen = new = 0
    for turn in branch.turns:
        new += turn.prompt_len - seen
        seen = turn.prompt_len + turn.completion_len
    return new


def shared_prefix(branch: Branch, others: Iterable[Branch]) -> int:
    """How many tokens of the branch's first prompt stand at the start of one of the other branches too."""
    prompt = branch.token_ids[: branch.turns[0].prompt_len] if branch.turns else branch.token_ids
    lengths = [0]
    for other in others:
        n = min(len(prompt), len(other))
        differs = prompt[:n] != other.token_ids[:n]
        lengths.append(int(differs.argmax()) if differs.any() else n)
    return max(lengths)


def subagent_calls(edges: Collection[Edge]) -> set[str]:
    """The calls that belong to sub-agents, nested ones included, by the edges that the harness declares."""
    members = {edge.dst for edge in edges if edge.type == "subagent_call"}
    while found := {e.dst for e in edges if e.type in INHERITING and e.src in members} - members:
        members |= found
    return members


def weigh_by_prompt(traces: Sequence[Trace]) -> None:
    """rl weight 1/T_q for every sampled token of a group with T_q of them: each prompt weighs 1 in the loss, however long
    its rollouts are, and N_rl is the number of prompts (prompt-mean aggregation of MiMo-V2.6, Eq. 1).

    T_q also counts tokens of zero advantage, which are dropped afterwards: such a group keeps less than 1.
    """
    total = sum(trace.num_sampled for trace in traces)
    for trace in traces:
        assign_rl_weights(trace, 1.0 / total)
