"""The environments by name. A new one is one file beside this one and one line here."""

from envs.alphabet_sort import AlphabetSort
from envs.arithmetic import Arithmetic
from envs.base import Agent, Env
from envs.calculator import Calculator
from envs.countdown import Countdown
from envs.delegate import Delegate
from envs.demonstrations import Demonstrations
from envs.gsm8k import GSM8K
from envs.kuhn_poker import KuhnPoker
from envs.proposer_solver import ProposerSolver
from envs.reasoning_gym import ReasoningGym
from envs.reverse_text import ReverseText
from envs.terminal import Terminal
from envs.wordle import Wordle

ENVS: dict[str, type[Env]] = {
    "reverse-text": ReverseText,
    "arithmetic": Arithmetic,
    "alphabet-sort": AlphabetSort,
    "calculator": Calculator,
    "kuhn-poker": KuhnPoker,
    "delegate": Delegate,
    "demonstrations": Demonstrations,
    "gsm8k": GSM8K,
    "reasoning-gym": ReasoningGym,
    "countdown": Countdown,
    "wordle": Wordle,
    "terminal": Terminal,
    "proposer-solver": ProposerSolver,
}

__all__ = ["ENVS", "Agent", "Env"]
