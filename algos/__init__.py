"""The algorithms by name. A new one is one file beside this one and one line here."""

from algos.base import Algorithm, AlgorithmConfig
from algos.echo import Echo
from algos.grpo import GRPO
from algos.hierarchical_grpo import HierarchicalGRPO
from algos.max_rl import MaxRL
from algos.opd import OPD
from algos.opsd import OPSD
from algos.rae import RAE
from algos.sft import SFT

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "max_rl": MaxRL,
    "rae": RAE,
    "hierarchical_grpo": HierarchicalGRPO,
    "opd": OPD,
    "opsd": OPSD,
    "sft": SFT,
    "echo": Echo,
}

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmConfig"]
