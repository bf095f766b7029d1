"""OPSD: on-policy self-distillation. The policy, shown a demonstration, teaches itself without it.

Equation. The live policy reads the rollout once more behind a hint h, a system message that holds a demonstration. Every
sampled token y_t gets, in the ref_kl component,

    signal_t = log pi(y_t | h, y_<t) - log pi(y_t | y_<t)

The sample is scored verbatim, token by token as it was sampled; only the hint is rendered (SDFT, arXiv:2601.19897).

Example. With the hint log-probs are -0.5, -1, -2, without it -1.5, -1, -0.5: signals 1, 0, -1.5.

When it helps: where demonstrations are there and the policy can follow one that it sees. This is the reverse form, with
one sample and the live weights. The authors of SDFT report a per-token forward KL and a teacher that is a moving average
of the policy; others measured the one-sample reverse KL below the base model. Compare before you trust it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from algos.base import Algorithm, AlgorithmConfig
from algos.hint import HintWriter
from algos.reference import check_temperature, score_trace
from traces import Episode, Task, trainable_traces


@dataclass
class OPSDConfig(AlgorithmConfig):
    """On-policy self-distillation from demonstrations."""

    template: str = (
        "Here is an example of a good response to the request below:\n\n{demonstration}\n\n"
        "Now give a response of your own."
    )
    """the hint; {demonstration} is replaced"""
    demo_key: str = "demonstration"
    """where a task has its demonstration: a key of its info, or else a field of the task"""
    hint_renderer: str = "auto"
    """renders the hint with the policy's tokenizer; auto: the renderer of the rollouts"""

    def check(self, source: Any, run: Any) -> list[str]:
        """Refuse a template without a place for the demonstration, tasks without one, and a temperature other than 1."""
        check_temperature("opsd", run)
        if "{demonstration}" not in self.template:
            raise ValueError(f"--template {self.template!r}: {{demonstration}} must stand in it")
        tasks = source.env.tasks("train")
        for task in tasks if isinstance(tasks, Sequence) else []:  # an endless stream shows only in the run
            demonstration(task, self.demo_key)
        return []


def demonstration(task: Task, key: str) -> str:
    """The demonstration of a task. Raises ValueError where it has none."""
    found = task.info.get(key, vars(task).get(key))
    if found is None or found == "":
        raise ValueError(
            f"--demo-key {key}: task {task.key!r} has no such demonstration; its info has {list(task.info)}"
        )
    return str(found)


class OPSD(Algorithm):
    """Reference log-probs = the live policy's own, behind a demonstration."""

    Config = OPSDConfig
    action_loss = "ref_kl"

    async def setup(self) -> None:
        """Build the renderer of the hint."""
        self.hints = HintWriter(self.config.hint_renderer, self.renderer)

    async def score_episode(self, episode: Episode) -> None:
        """Let the policy read each rollout behind its task's demonstration."""
        text = self.config.template.replace("{demonstration}", demonstration(episode.task, self.config.demo_key))
        for trace in trainable_traces([episode]):
            await score_trace(self.policy, trace, hint=lambda branch: self.hints.insertion(text, branch))
