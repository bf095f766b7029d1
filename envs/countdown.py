"""Countdown: reach a number from others with + - * /, each used at most once.

    user       Reach 118 from the numbers 3, 7, 25, 50 ...
    assistant  50 * 3 - 25 - 7 = 118, so <answer>50 * 3 - 25 - 7</answer>

The home of grpo where a long search pays: checking is easy and finding is not, so a model learns to try, look and try again.
It takes an instruction-tuned model of about a billion parameters or more, and --max-new-tokens 1024 to search in; begin with three
numbers, and look whether `formatted` and `legal` are well above 0 at step 0. The tiny models know nothing of it.
"""

import functools
import operator
import random
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from envs.base import Agent, Env, require_at_least, user
from envs.calculator import MAX_CHARS, evaluate
from traces import Task

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass
class Countdown(Env):
    """Reward 1 if the expression in the last <answer> tags equals the target exactly and uses each given number at most once.

    A legal expression that misses the target earns format_reward, everything else 0. Every task has a solution that uses all of
    its numbers; results in between may be negative or fractions.
    """

    numbers: int = 4
    """how many numbers are given, at most"""
    min_numbers: int = 3
    """how many numbers are given, at least"""
    max_number: int = 50
    """they are drawn from 1 to this one"""
    max_target: int = 100
    """the largest target; the smallest is 1"""
    format_reward: float = 0.0
    """what a legal expression earns that misses the target"""
    num_tasks: int = 4096
    """distinct tasks, both splits together, as far as there are so many"""

    def check(self) -> None:
        """Refuse ranges without a task, and a reward for the format that is worth more than the answer."""
        require_at_least(self, min_numbers=2, max_number=1, max_target=1, num_tasks=1)
        if not self.min_numbers <= self.numbers <= 8:
            raise ValueError(
                f"--env.numbers {self.numbers}: must lie between --env.min-numbers {self.min_numbers} and 8"
            )
        if not 0 <= self.format_reward < 1:
            raise ValueError(f"--env.format-reward {self.format_reward:g}: must lie in [0, 1)")
        if self.max_number > 9999:
            raise ValueError(f"--env.max-number {self.max_number}: must be at most 9999")

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """A checksum of numbers and target says to which split a task belongs: an eighth is held out."""
        made = make_tasks(self.numbers, self.min_numbers, self.max_number, self.max_target, self.num_tasks)
        return [task for task in made if (zlib.crc32(task.key.encode()) % 8 == 0) == (split == "eval")]

    async def play(self, task: Task, agent: Agent) -> None:
        """One question, one answer."""
        reply = await agent.say(*task.prompt)
        before, closed, _ = reply["content"].rpartition("</answer>")
        _, opened, expression = before.rpartition("<answer>")
        formatted = bool(opened and closed)
        value = value_of(expression, task.info["numbers"]) if formatted else None
        agent.trace.metrics |= {"formatted": float(formatted), "legal": float(value is not None)}
        reached = value == task.info["target"]
        agent.trace.reward = 1.0 if reached else self.format_reward if value is not None else 0.0


@functools.lru_cache(4)
def make_tasks(most: int, least: int, max_number: int, max_target: int, count: int) -> tuple[Task, ...]:
    """Distinct tasks, made by working out random expressions: solvable, because there is the solution."""
    rng, tasks = random.Random(0), {}
    for _ in range(20 * count):
        given = [rng.randint(1, max_number) for _ in range(rng.randint(least, most))]
        solution, target = random_expression(rng, given)
        if target.denominator != 1 or not 1 <= target <= max_target or target in given:
            continue
        key = f"{','.join(map(str, sorted(given)))}={target}"
        info = {"numbers": given, "target": int(target), "answer": solution, "demonstration": tagged(solution)}
        tasks.setdefault(key, Task(key, [user(question(given, int(target)))], info))
        if len(tasks) == count:
            break
    return tuple(tasks.values())


def question(numbers: list[int], target: int) -> str:
    """The whole rule in words."""
    return (
        f"Reach {target} from the numbers {', '.join(map(str, numbers))}. Use each of them at most once, with + - * / and "
        f"parentheses. Think first, then give one expression without an equals sign, like this: {tagged('(1 + 2) * 3')}"
    )


def tagged(expression: str) -> str:
    """The expression as an answer."""
    return f"<answer>{expression}</answer>"


def random_expression(rng: random.Random, numbers: list[int]) -> tuple[str, Fraction]:
    """(expression, value): all the numbers, joined two by two in random order. A division by zero becomes a product."""
    parts = [(str(number), Fraction(number)) for number in numbers]
    while len(parts) > 1:
        (left, a), (right, b) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        symbol = rng.choice("+-*/")
        symbol = "*" if symbol == "/" and b == 0 else symbol
        parts.append((f"({left} {symbol} {right})", OPERATIONS[symbol](a, b)))
    expression, value = parts[0]
    return expression[1:-1], value


def value_of(expression: str, numbers: list[int]) -> Fraction | None:
    """The exact value of a legal expression, else None. Legal: at most 100 characters, whole numbers that are given, each at most
    as often as it is given, + - * / (also as a sign), parentheses, spaces."""
    expression = expression.strip()
    if len(expression) > MAX_CHARS or re.search(r"[^0-9+\-*/() \n]|\*\*|//", expression):
        return None
    if Counter(map(int, re.findall("[0-9]+", expression))) - Counter(numbers):
        return None
    try:
        return evaluate(expression)
    except (ValueError, ArithmeticError):
        return None
