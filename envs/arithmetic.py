"""Add two numbers. Right or wrong, nothing in between."""

import random
import re
from dataclasses import dataclass
from typing import Literal

from envs.base import Agent, Env, require_at_least, user
from traces import Task


@dataclass
class Arithmetic(Env):
    """a + b with 0 <= a, b <= max_number; reward 1 if the last number of the reply is the sum, else 0."""

    max_number: int = 99

    def check(self) -> None:
        """Refuse a range of one number: a single pair can not be split."""
        require_at_least(self, max_number=1)

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """All pairs in a fixed random order: every tenth is held out."""
        pairs = [(a, b) for a in range(self.max_number + 1) for b in range(self.max_number + 1)]
        random.Random(0).shuffle(pairs)
        chosen = [pair for i, pair in enumerate(pairs) if (i % 10 == 0) == (split == "eval")]
        return [
            Task(f"{a}+{b}", [user(f"Compute {a} + {b}. Reply with just the number.")], {"answer": a + b})
            for a, b in chosen
        ]

    async def play(self, task: Task, agent: Agent) -> None:
        """One question, one answer."""
        reply = await agent.say(*task.prompt)
        numbers = re.findall(r"-?\d+", reply["content"].replace(",", ""))
        agent.trace.reward = float(numbers[-1:] == [str(task.info["answer"])])
