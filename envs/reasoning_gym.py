"""Any task of the package reasoning-gym (arXiv:2505.24760): over a hundred families of puzzles, made as they are wanted.

    python train.py --env reasoning-gym --env.task gsm_symbolic --model Qwen/Qwen3-0.6B
    python train.py --env reasoning-gym --env.task syllogism --model smollm2 --engine vllm --steps 20
    python train.py --env reasoning-gym --env.task basic_arithmetic --env.config max_terms=3 max_digits=2 --model Qwen/Qwen3-0.6B

The home of task samplers and gates (a family's options make it easier or harder) and of grpo and max_rl on a real model. It takes an
instruction-tuned model, which is asked for the answer alone on the last line. --env.answer tags asks as the package does, to think
step by step and to write <answer> tags. Look at `formatted` there first: where it is low, a run learns where to put the answer, and
not how to find it. SmolLM2-135M never writes them.

Some of the package's scorers evaluate what the model wrote as Python. They run in a worker process that can write no file and has
a limit of time and memory, which is less than a sandbox: mind what you train on a machine that matters.

A seed gives the same questions every time, with the exception of isomorphic_strings, list_functions, polynomial_multiplication and
ransom_note, which follow Python's random string hash: set PYTHONHASHSEED for those. `composite` can not be described in flags.
"""

import difflib
import functools
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from envs.base import Agent, Env, require_at_least, user
from envs.grading import grade, installed, require_seconds
from traces import Task

# The package makes entry i of a seed from seed + i, so seeds that are near each other give the same entries.
EVAL_SEED = 2**31
MAX_SEED = 10**9
LAST_LINE = "Give the final answer alone on the last line."


@dataclass
class ReasoningGym(Env):
    """A question of the family `task`; the reward is the package's score of the answer, 1 for the right one.

    A reply without an answer earns 0 (`formatted` is the share that has one), and so does an answer that the scorer fails at
    (`unreadable`). Questions are distinct, and none stands in both splits.
    """

    task: str = ""
    """family of tasks, e.g. gsm_symbolic, countdown, basic_arithmetic"""
    config: dict[str, Any] = field(default_factory=dict)
    """options of the family, e.g. --env.config min_digits=2"""
    size: int = 1000
    """training questions that are made; fewer if some are alike"""
    eval_size: int = 128
    """held-out questions that are made"""
    seed: int = 0
    """of the questions"""
    answer: Literal["last-line", "tags"] = "last-line"
    """where the answer stands: on the last line, or in the last <answer>...</answer>, as the package's system prompt asks"""
    system_prompt: str = "default"
    """which of the package's system prompts asks for --env.answer tags: default, simple, direct, ..."""
    grading_timeout: float = 10.0
    """seconds after which an answer can not be graded, and the rollout counts as errored"""

    def check(self) -> None:
        """Refuse a family that the package does not have, and options that the family does not take."""
        require_at_least(self, size=1, eval_size=1, seed=0)
        if self.seed > MAX_SEED:
            raise ValueError(f"--env.seed {self.seed}: must be at most {MAX_SEED}")
        require_seconds(self)
        if not installed("reasoning_gym"):
            raise ValueError("--env reasoning-gym needs the package of that name: pip install -e '.[envs]'")
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.utils import SYSTEM_PROMPTS

        if self.task not in DATASETS:
            close = difflib.get_close_matches(self.task, DATASETS, 3, 0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else "e.g. gsm_symbolic, countdown, basic_arithmetic"
            raise ValueError(
                f"--env.task {self.task or 'is missing'}: choose one of reasoning-gym's {len(DATASETS)}; {hint}"
            )
        if self.system_prompt not in SYSTEM_PROMPTS:
            raise ValueError(f"--env.system-prompt {self.system_prompt}: choose one of {', '.join(SYSTEM_PROMPTS)}")
        if self.system_prompt != "default" and self.answer != "tags":
            raise ValueError(f"--env.system-prompt {self.system_prompt}: goes with --env.answer tags alone")
        for name in {"seed", "size"} & self.config.keys():
            raise ValueError(f"--env.config {name}={self.config[name]}: set --env.{name} instead")
        written = " ".join(f"{name}={value}" for name, value in self.config.items())
        try:
            dataset(self.task, json.dumps(self.config), 0, 1)
        except Exception as error:  # each family checks in its own way
            known = ", ".join(
                name for name in DATASETS[self.task][1].__dataclass_fields__ if name not in ("seed", "size")
            )
            raise ValueError(f"--env.config {written}: {self.task} says: {error} (its options: {known})") from error

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """Distinct questions of two seeds; of one that both gave, a checksum says to which split it belongs."""
        from reasoning_gym.utils import SYSTEM_PROMPTS

        train, held_out = entries(self.task, json.dumps(self.config), self.seed, self.size, self.eval_size)
        chosen, other = (held_out, train) if split == "eval" else (train, held_out)
        tasks = []
        for key, entry in chosen.items():
            if key in other and (int(key, 16) % 2 == 0) != (split == "eval"):
                continue
            if self.answer == "tags":
                prompt = [{"role": "system", "content": SYSTEM_PROMPTS[self.system_prompt]}, user(entry["question"])]
            else:
                prompt = [user(f"{entry['question']}\n\n{LAST_LINE}")]
            tasks.append(Task(key, prompt, {"answer": entry["answer"], "entry": entry}))
        if not tasks and split == "train":
            raise ValueError(f"--env.task {self.task}: with this --env.config all of its questions are held out")
        return tasks

    async def play(self, task: Task, agent: Agent) -> None:
        """One question, one answer."""
        reply = await agent.say(*task.prompt)
        answer = self.extract(reply["content"])
        metrics = agent.trace.metrics
        metrics["formatted"], metrics["unreadable"], agent.trace.reward = float(answer is not None), 0.0, 0.0
        if answer is not None:
            found = await grade(
                agent, score, self.task, json.dumps(self.config), answer, task.info["entry"],
                needs="reasoning_gym", seconds=self.grading_timeout,
            )  # fmt: skip
            agent.trace.reward, metrics["unreadable"] = (0.0, 1.0) if found is None else (found, 0.0)

    def extract(self, text: str) -> str | None:
        """The answer in a reply, or None."""
        if self.answer == "last-line":
            return text.strip().rpartition("\n")[2].strip() or None
        before, closed, _ = text.rpartition("</answer>")
        _, opened, answer = before.rpartition("<answer>")
        return answer.strip() if opened and closed else None


@functools.lru_cache(4)
def dataset(task: str, config: str, seed: int, size: int) -> Any:
    """The package's object of a family; config as JSON."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(config))


@functools.lru_cache(4)
def entries(task: str, config: str, seed: int, size: int, eval_size: int) -> tuple[dict[str, dict], dict[str, dict]]:
    """(train, held out) of a seed: distinct entries by a hash of their question."""
    splits = []
    for first, count in ((seed, size), (seed + EVAL_SEED, eval_size)):
        made = dataset(task, config, first, count)
        splits.append({hashlib.sha1(made[i]["question"].encode()).hexdigest()[:12]: made[i] for i in range(count)})
    return splits[0], splits[1]


def score(task: str, config: str, answer: str, entry: dict[str, Any]) -> float | None:
    """The package's score of an answer; None where its scorer fails at it."""
    scorer = dataset(task, config, 0, 1)
    try:
        return float(scorer.score_answer(answer, entry))
    except (Exception, SystemExit):  # it may run exit(), which a model wrote
        return None
