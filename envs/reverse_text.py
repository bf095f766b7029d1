"""Reverse a text, letter by letter. Graded by edit distance, so that a nearly right answer earns something."""

import random
import string
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envs.base import Agent, Env, require_at_least, user
from traces import Task


@dataclass
class ReverseText(Env):
    """Reverse random lowercase words; reward = 1 - edit distance / length of the longer string."""

    max_words: int = 3
    max_letters: int = 5
    num_tasks: int = 4096

    def check(self) -> None:
        """Refuse texts of nothing, and no texts."""
        require_at_least(self, max_words=1, max_letters=1, num_tasks=1)

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """Distinct texts; a checksum of the text decides which split it belongs to."""
        rng = random.Random(0)
        texts: dict[str, None] = {}
        for _ in range(100 * self.num_tasks):
            text = random_text(rng, self.max_words, self.max_letters)
            if (zlib.crc32(text.encode()) % 4 == 0) == (split == "eval"):
                texts[text] = None
            if len(texts) == self.num_tasks:
                break
        return [Task(text, [user(f"Reverse: {text}")], {"answer": text[::-1]}) for text in texts]

    async def play(self, task: Task, agent: Agent) -> None:
        """One question, one answer."""
        reply = await agent.say(*task.prompt)
        agent.trace.reward = similarity(reply["content"], task.info["answer"])
        agent.trace.metrics["exact"] = float(reply["content"] == task.info["answer"])


def random_text(rng: random.Random, max_words: int, max_letters: int) -> str:
    """One to max_words words of two to max_letters letters."""
    words = rng.randint(1, max_words)
    return " ".join(
        "".join(rng.choices(string.ascii_lowercase, k=rng.randint(min(2, max_letters), max_letters)))
        for _ in range(words)
    )


def similarity(a: Sequence[Any], b: Sequence[Any]) -> float:
    """1 - Levenshtein distance / length of the longer string (or list); 1.0 for two empty ones."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return 1.0 - row[-1] / max(len(a), len(b), 1)
