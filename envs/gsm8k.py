"""Grade-school word problems (GSM8K, arXiv:2110.14168): the answer is a number, the way there is the model's own.

The home of grpo and max_rl on a real model: graded answers, several tries a task, some of them right. It takes a model that
already solves a part of the problems, which instruction-tuned ones from about half a billion parameters on are reported to do, with
--max-new-tokens 512 or more. Nothing is learned from groups that are all wrong: look at the evaluation of step 0 first.

The problems come from a file of yours (--env.path) or, where the package `datasets` is installed, from the Hugging Face hub.
"""

import functools
import hashlib
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envs.base import Agent, Env, user
from envs.grading import equal_math, grade, installed, last_boxed, require_seconds
from traces import Task

HUB = "openai/gsm8k"


@dataclass
class GSM8K(Env):
    r"""A word problem; reward 1 if what stands in the last \boxed{} of the reply equals the answer (math-verify decides), else 0.

    A reply without a closed \boxed{} has no answer: `formatted` is the share that has one. The training tasks carry the worked
    solution as a demonstration.
    """

    path: str | None = None
    """JSONL file of {"question": ..., "answer": "... #### 18"}; default: openai/gsm8k from the hub, its test split held out"""
    eval_path: str | None = None
    """a second such file, held out; default with --env.path: every tenth of its problems"""
    instruction: str = "Reason step by step, and put the final answer in \\boxed{}."
    """what stands below the question"""
    grading_timeout: float = 10.0
    """seconds after which an answer can not be graded, and the rollout counts as errored"""

    def check(self) -> None:
        """Refuse a file that can not be read, and what needs a package that is not installed."""
        if not installed("math_verify"):
            raise ValueError("--env gsm8k is graded by math-verify, which is not installed: pip install -e '.[envs]'")
        require_seconds(self)
        if self.path is None:
            if self.eval_path is not None:
                raise ValueError(f"--env.eval-path {self.eval_path}: needs --env.path for the training problems")
            if not installed("datasets"):
                raise ValueError(
                    f"--env.path is not given, and `datasets`, which fetches {HUB}, is not installed: pip install -e '.[envs]'"
                )
        else:
            self._problems("train")

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """The problems of the hub's two splits or of two files, or a file's in a fixed random order, every tenth held out."""
        tasks = []
        for question, solution in self._problems(split).items():
            worked, _, answer = solution.rpartition("####")
            answer = answer.strip()
            worked = re.sub(r"<<.*?>>", "", worked).strip()  # the data's notes for a calculator
            info = {"answer": answer, "demonstration": f"{worked}\n\\boxed{{{answer}}}".strip()}
            key = hashlib.sha1(question.encode()).hexdigest()[:12]
            tasks.append(Task(key, [user(f"{question}\n\n{self.instruction}")], info))
        return tasks

    async def play(self, task: Task, agent: Agent) -> None:
        """One question, one answer."""
        reply = await agent.say(*task.prompt)
        answer = last_boxed(reply["content"])
        agent.trace.metrics["formatted"] = float(answer is not None)
        right = answer is not None and await grade(
            agent, equal_math, task.info["answer"], answer, needs="math_verify", seconds=self.grading_timeout
        )
        agent.trace.reward = float(right)

    def _problems(self, split: Literal["train", "eval"]) -> dict[str, str]:
        """Question -> solution."""
        if self.path is None:
            held_out = read_hub("test")
            chosen = held_out if split == "eval" else read_hub("train")
        elif self.eval_path is not None:
            held_out = read_file(self.eval_path, "--env.eval-path")
            chosen = held_out if split == "eval" else read_file(self.path, "--env.path")
        else:
            problems = list(read_file(self.path, "--env.path").items())
            random.Random(0).shuffle(problems)
            chosen = dict(problems)
            held_out = dict(problems[::10])
            if len(problems) < 2:
                raise ValueError(f"--env.path {self.path}: {len(problems)} problems can not be split in two")
        if split == "eval":
            return held_out
        return {question: solution for question, solution in chosen.items() if question not in held_out}


def read_file(path: str, option: str) -> dict[str, str]:
    """Question -> solution, each question once. Raises ValueError that names option, file and line."""
    problems = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ValueError(f"{option} {path}: {reason}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            question, solution = row["question"], row["answer"]
        except (ValueError, KeyError, TypeError):
            question = solution = None
        if not (isinstance(question, str) and isinstance(solution, str) and solution.rpartition("####")[2].strip()):
            raise ValueError(
                f'{option} {path}: line {number} is no {{"question": "...", "answer": "... #### 18"}}: {line[:60]}'
            )
        problems.setdefault(question, solution)
    return problems


@functools.lru_cache
def read_hub(split: str) -> dict[str, str]:
    """A split of openai/gsm8k. Raises ValueError, naming what helps without a hub."""
    import datasets

    try:
        rows = datasets.load_dataset(HUB, "main", split=split)
        return {row["question"]: row["answer"] for row in rows}
    except Exception as error:  # it has many ways to say that there is no network
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"--env.path is not given, and {HUB} did not come from the hub: {reason}") from error
