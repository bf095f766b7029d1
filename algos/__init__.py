"""The algorithms by name. A new one is one file beside this one and one line here."""

from algos.base import Algorithm, AlgorithmConfig
from algos.grpo import GRPO

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
}

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmConfig"]
