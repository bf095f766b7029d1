"""Proposer and solver, one model in both roles: hierarchical GRPO on problems that it asks itself.

    python train.py configs/hierarchical_grpo_tiny.py

Shows an environment whose problems are made by the policy: some 32 proposals a step, in groups of 16 from one source task, and
4 attempts at each that can be read. Costs two minutes on one CPU core: the runs below took 92, 120 and 85 s beside another one.
Expect (measured, seeds 0, 1, 2, from the mean of the first five steps to that of the last third)

    reward/proposer-solver/solver      0.44, 0.46, 0.47     to  0.70, 0.73, 0.75
    reward/proposer-solver/proposer   -0.09, -0.09, -0.09   to  0.15, 0.14, 0.13
    env/proposer-solver/malformed      0.40, 0.44, 0.44     to  0.06, 0.04, 0.04
    env/proposer-solver/usefulness     0.18, 0.23, 0.23     to  0.19, 0.17, 0.16
    eval/proposer-solver/solver        0.36, 0.37, 0.39     to  0.40, 0.36, 0.36   (step 0 and the end: fixed problems)

Read them together. What the proposer learns is to write problems that can be read, and easier ones: their largest number falls
from 14 to 8. Its usefulness is at most 0.24 for some twenty steps and ends where it began or below, since the solver grows sure of what
it is asked. On fixed problems the solver ends where it began (three evaluations of the same start differ by 0.04): its gain on
the proposer's problems is that these are easier. With `--env.surprise-bonus 0.015` (seed 1 alone) usefulness ends at 0.19 and the fixed problems at 0.42.
"""

from algos.hierarchical_grpo import HierarchicalGRPOConfig
from config import Config, Source
from envs.proposer_solver import ProposerSolver

config = Config(
    sources=[Source(env=ProposerSolver(), algo=HierarchicalGRPOConfig(), group_size=16)],
    steps=110,
    batch_size=160,
    constant_batch_size=False,
    max_new_tokens=12,
    lr=3e-4,
    eval_every=55,
)
