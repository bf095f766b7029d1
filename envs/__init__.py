"""The environments by name. A new one is one file beside this one and one line here."""

from envs.arithmetic import Arithmetic
from envs.base import Agent, Env
from envs.calculator import Calculator
from envs.proposer_solver import ProposerSolver
from envs.reverse_text import ReverseText

ENVS: dict[str, type[Env]] = {
    "reverse-text": ReverseText,
    "arithmetic": Arithmetic,
    "calculator": Calculator,
    "proposer-solver": ProposerSolver,
}

__all__ = ["ENVS", "Agent", "Env"]
