"""Sort names over several turns: each turn brings new ones, and all that came so far are to be sorted.

    user       Sort alphabetically and reply with just the names: Teli Bako Miru
    assistant  Bako Miru Teli
    user       Sort these in as well: Kanu
    assistant  Bako Kanu Miru Teli

A conversation of user turns, and so the place where chat templates that drop the reasoning of earlier turns show: with
`--thinking-retention all` an episode is one sequence, with `template` one for each turn that reasoning was dropped from.
"""

import itertools
import random
import re
import zlib
from dataclasses import dataclass
from typing import Literal

from envs.base import Agent, Env, require_at_least, user
from envs.reverse_text import similarity
from traces import Task

CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aeiou"


@dataclass
class AlphabetSort(Env):
    """Sort names; reward = mean over the turns of 1 - edit distance in names / length of the longer list.

    A name that is missing, too much or out of place is one edit; upper and lower case, commas and numbers do not count. A turn
    that a limit cut off counts 0.
    """

    turns: int = 2
    names: int = 3
    """in the first turn"""
    more: int = 1
    """that each later turn brings"""
    syllables: Literal[1, 2, 3] = 2
    """of a name"""
    num_tasks: int = 4096

    def check(self) -> None:
        """Refuse no turns, no names, and more names than there are."""
        require_at_least(self, turns=1, names=1, more=1, num_tasks=1)
        needed, there = self.names + (self.turns - 1) * self.more, len(names_of("eval", self.syllables))
        if needed > there:
            raise ValueError(f"--env.names {self.names}: {needed} names in all turns, and only {there} to choose from")

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """Distinct draws of distinct names; the two splits have no name in common."""
        rng, pool = random.Random(0), names_of(split, self.syllables)
        sizes = [self.names, *[self.more] * (self.turns - 1)]
        found: dict[str, Task] = {}
        for _ in range(100 * self.num_tasks):
            drawn = rng.sample(pool, sum(sizes))
            key = " ".join(drawn)
            ends = list(itertools.accumulate(sizes))
            texts = [" ".join(drawn[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
            later = [f"Sort these in as well: {text}" for text in texts[1:]]
            info = {"answers": [sorted(drawn[:end]) for end in ends], "later": later}
            found[key] = Task(key, [user(f"Sort alphabetically and reply with just the names: {texts[0]}")], info)
            if len(found) == self.num_tasks:
                break
        return list(found.values())

    async def play(self, task: Task, agent: Agent) -> None:
        """Ask for all names so far, turn by turn."""
        answers, metrics = task.info["answers"], agent.trace.metrics
        messages = [task.prompt, *[[user(text)] for text in task.info["later"]]]
        agent.trace.reward, metrics["exact"], exact = 0.0, 0.0, 0
        for number, (said, answer) in enumerate(zip(messages, answers, strict=True), 1):
            reply = await agent.say(*said)
            score = similarity(names_in(reply["content"]), [name.lower() for name in answer])
            agent.trace.reward += score / len(answers)
            metrics[f"turn_{number}"] = score
            exact += score == 1.0
            metrics["exact"] = float(exact == len(answers))


def names_of(split: str, syllables: int) -> list[str]:
    """All names of so many syllables, each a consonant and a vowel, whose checksum puts them into a split."""
    letters = itertools.product(*[CONSONANTS, VOWELS] * syllables)
    names = ["".join(name).capitalize() for name in letters]
    return [name for name in names if (zlib.crc32(name.encode()) % 4 == 0) == (split == "eval")]


def names_in(reply: str) -> list[str]:
    """The words of a reply, in lower case."""
    return re.findall(r"[^\W\d_]+", reply.lower())
