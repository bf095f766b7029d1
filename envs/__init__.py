"""The environments by name. A new one is one file beside this one and one line here."""

from envs.alphabet_sort import AlphabetSort
from envs.arithmetic import Arithmetic
from envs.base import Agent, Env
from envs.calculator import Calculator
from envs.delegate import Delegate
from envs.demonstrations import Demonstrations
from envs.kuhn_poker import KuhnPoker
from envs.reverse_text import ReverseText

ENVS: dict[str, type[Env]] = {
    "reverse-text": ReverseText,
    "arithmetic": Arithmetic,
    "alphabet-sort": AlphabetSort,
    "calculator": Calculator,
    "kuhn-poker": KuhnPoker,
    "delegate": Delegate,
    "demonstrations": Demonstrations,
}

__all__ = ["ENVS", "Agent", "Env"]
