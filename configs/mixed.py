"""Two environments and two algorithms in one run: GRPO on arithmetic beside ECHO on the calculator.

    python train.py configs/mixed.py

Shows two sources with an algorithm each, whose sequences share micro batches. Costs three minutes on two CPU cores. Expect
(measured, seeds 0, 1, 2) held-out rewards from 0.16, 0.19, 0.14 to 0.93, 0.95, 0.95 on arithmetic and from 0.21, 0.24, 0.23 to
0.78, 0.76, 0.86 on the calculator.
"""

from pathlib import Path

from algos.echo import EchoConfig
from algos.grpo import GRPOConfig
from config import Config, Source
from envs.arithmetic import Arithmetic
from envs.calculator import Calculator

config = Config(
    # --model tiny would be the model of the first environment; this one was taught both.
    model=str(Path(__file__).resolve().parent.parent / "models" / "tiny" / "mixed"),
    sources=[
        Source(env=Arithmetic(), algo=GRPOConfig()),
        Source(env=Calculator(), algo=EchoConfig(roles={"tool": 0.1})),
    ],
    steps=40,
    batch_size=128,
    max_new_tokens=96,
    lr=5e-4,
)
