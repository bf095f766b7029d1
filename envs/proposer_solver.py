"""One model invents problems, the same model solves them: the home of algorithms that compare each job with itself.

    proposer   user       Write 2 numbers up to 50 joined by + or *, nothing else.
               assistant  7*12
    solver     user       What is 7*12?
    (n times)  assistant  84                 1 for the right number, else 0

A proposer earns 1 - |2p - 1|, where p is the share of the n solvers that are right: 1 where half of them are, 0 where
all or none are, and then there is nothing to learn from the problem either. So its reward follows the solver's skill.

A malformed proposal is one that is not what was asked for: other words beside the problem, too many numbers or too large ones, an
operator that was not offered, none at all. It earns `malformed_reward`, less than a problem that nobody or everybody solves, and
no solver is asked: their traces stay empty, have no reward and enter no mean. The answer is computed exactly and without `eval`; solvers see
the problem as it was read (`007 + 1` as `7+1`), never the text that the proposer wrote.

`env/proposer-solver/malformed` is the share of malformed proposals, and of the others `pass_rate` is the mean of p, `usefulness` that of
1 - |2p - 1|, `operators` and `largest` their number of operators and their largest number. They are the proposer's, and are told while it is trained.

The reward that solvers earn in training depends on what they are asked: it rises when the proposer turns to easier problems.
Held-out tasks therefore ask no proposer. They are a fixed list of problems, drawn once from all source tasks alike, and
`eval/proposer-solver/solver` is the share that the policy solves in n attempts each. No choice of a proposer
changes what is asked there; a proposal may by chance be one of them, as any other problem, and then it is trained on.

With n = 1, p is 0 or 1: a proposer is only paid for problems that can be read.
"""

import asyncio
import math
import random
import re
from dataclasses import dataclass, field
from itertools import combinations
from typing import ClassVar, Literal

from envs.base import Agent, Env, Player, require_at_least, user
from envs.calculator import MAX_CHARS, evaluate
from traces import Task

OPERATORS = "+-*"
FIXED_PROBLEMS = 320


@dataclass
class ProposerSolver(Env):
    """A problem is invented and attempted; rewards: solver 1 if right, else 0, proposer 1 - |2p - 1| with p the share of right solvers."""

    proposer_solver: ClassVar[bool] = True

    n: int = 4
    """solvers that attempt one proposed problem"""
    max_number: int = 50
    """source tasks ask for numbers up to 5, 10, ..., at most this"""
    max_operators: int = 1
    """of a problem"""
    train_proposer: bool = True
    """train on what the policy says as the proposer"""
    train_solver: bool = True
    """train on what the policy says as a solver"""
    malformed_reward: float = -0.5
    """of a proposer whose proposal is no problem"""
    surprise_bonus: float = 0.0
    """reward of a trained proposer for each nat by which its proposal was improbable, up to those of a problem drawn at random: keeps
    it from saying always the same"""
    proposer: Player = field(default_factory=Player)
    solver: Player = field(default_factory=Player)

    @property
    def agents(self) -> tuple[str, ...]:
        """One proposer and n solvers."""
        return ("proposer", *["solver"] * self.n)

    def check(self) -> None:
        """Refuse sizes that leave nothing to propose or nobody to solve it."""
        if not (math.isfinite(self.malformed_reward) and self.malformed_reward <= 0):
            raise ValueError(f"--env.malformed-reward {self.malformed_reward}: must be a finite number, at most 0")
        if not (math.isfinite(self.surprise_bonus) and self.surprise_bonus >= 0):
            raise ValueError(f"--env.surprise-bonus {self.surprise_bonus}: must be a finite number, at least 0")
        require_at_least(self, n=1, max_number=5, max_operators=1)
        for name, most in {"max_number": 10_000, "max_operators": 8}.items():  # what the calculator can hold
            if getattr(self, name) > most:
                raise ValueError(f"--env.{name.replace('_', '-')} {getattr(self, name)}: must be at most {most}")

    def trains(self, agent: str) -> bool:
        """As `train_proposer` and `train_solver` say."""
        return self.train_proposer if agent == "proposer" else self.train_solver

    def sources(self) -> list[tuple[str, int]]:
        """(operators, largest number) of all source tasks, in a fixed random order."""
        subsets = ["".join(subset) for size in (1, 2, 3) for subset in combinations(OPERATORS, size)]
        sources = [(subset, limit) for subset in subsets for limit in range(5, self.max_number + 1, 5)]
        random.Random(0).shuffle(sources)
        return sources

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """Source tasks for the proposer to train on; for evaluation a fixed list of problems."""
        if split == "train":
            count = " or ".join(str(numbers) for numbers in range(2, self.max_operators + 2))
            return [
                Task(
                    f"{operators} {limit}",
                    [user(f"Write {count} numbers up to {limit} joined by {' or '.join(operators)}, nothing else.")],
                    {"operators": operators, "limit": limit},
                )
                for operators, limit in self.sources()
            ]
        rng, sources = random.Random(1), self.sources()
        problems = [self.draw(*sources[i % len(sources)], rng) for i in range(FIXED_PROBLEMS)]
        return [Task(problem, [user(question(problem))], {"problem": problem}) for problem in dict.fromkeys(problems)]

    def draw(self, operators: str, limit: int, rng: random.Random) -> str:
        """A random problem that a source task asks for."""
        problem = str(rng.randint(0, limit))
        for _ in range(rng.randint(1, self.max_operators)):
            problem += f"{rng.choice(operators)}{rng.randint(0, limit)}"
        return problem

    def read(self, proposal: str, operators: str, limit: int) -> str | None:
        """The proposed problem, without spaces and leading zeros; None where it is not what the source task asks for."""
        symbols = re.escape(operators)
        form = rf"\s*\d+(\s*[{symbols}]\s*\d+){{1,{self.max_operators}}}\s*"
        if len(proposal) > MAX_CHARS or not re.fullmatch(form, proposal, re.ASCII):
            return None
        parts = [str(int(part)) if part.isdigit() else part for part in re.findall(rf"\d+|[{symbols}]", proposal)]
        return "".join(parts) if all(int(part) <= limit for part in parts if part.isdigit()) else None

    async def play(self, task: Task, proposer: Agent, *solvers: Agent) -> None:
        """Have a problem proposed, unless the task is one, and all solvers attempt it at once."""
        problem, metrics = task.info.get("problem"), proposer.trace.metrics
        if problem is None:
            proposal = (await proposer.say(*task.prompt))["content"]
            problem = self.read(proposal, task.info["operators"], task.info["limit"])
            proposer.trace.reward = self._bonus(proposer, **task.info)
            metrics["malformed"] = float(problem is None)
        if problem is None:
            proposer.trace.reward += self.malformed_reward
            return
        rewards = await asyncio.gather(*[self._attempt(problem, solver) for solver in solvers])
        if proposer.trace.reward is not None:
            pass_rate = sum(rewards) / len(rewards)
            usefulness = 1 - abs(2 * pass_rate - 1)
            proposer.trace.reward += usefulness
            numbers = re.findall(r"\d+", problem)
            metrics |= {
                "pass_rate": pass_rate,
                "usefulness": usefulness,
                "operators": len(numbers) - 1.0,
                "largest": float(max(map(int, numbers))),
            }

    async def _attempt(self, problem: str, solver: Agent) -> float:
        reply = await solver.say(user(question(problem)))
        numbers = re.findall(r"-?\d+", reply["content"].replace(",", ""))
        solver.trace.reward = float(numbers[-1:] == [str(evaluate(problem))])
        return solver.trace.reward

    def _bonus(self, proposer: Agent, operators: str, limit: int) -> float:
        """For a proposal of the policy alone: what others say is not learned, and their log-probs may be unknown. No more than for a
        random one of the problems that were asked for: else a long text of nonsense, or of spaces and zeros, is what pays."""
        if not self.surprise_bonus or not proposer.trace.trainable:
            return 0.0
        nats = -sum(float(branch.logprobs[branch.sampled].sum()) for branch in proposer.trace.branches)
        sizes = range(1, self.max_operators + 1)
        most = math.log(sum((limit + 1) ** (size + 1) * len(operators) ** size for size in sizes))
        return self.surprise_bonus * min(nats, most)


def question(problem: str) -> str:
    """What a solver is asked."""
    return f"What is {problem}?"
