"""ECHO on the calculator: GRPO on what the model says, cross-entropy on what the tool answers.

    python train.py configs/echo_tiny.py

Shows an environment that answers (a tool), and what the cross-entropy on its words does. Costs two minutes on two CPU cores.
Expect (measured, seed 0) a held-out reward from 0.34 to above 0.8, and ce/nll, the policy's on the tool's words, from 1.6 to
below 0.5; with a weight of nearly nothing, `--roles tool=1e-12`, that is with grpo alone, the reward rises alike and the nll
stays at 0.6 and more. From other starts the curve may differ.
"""

from algos.echo import EchoConfig
from config import Config, Source
from envs.calculator import Calculator

config = Config(
    sources=[Source(env=Calculator(), algo=EchoConfig(roles={"tool": 0.1}))],
    steps=45,
    batch_size=128,
    max_new_tokens=96,
)
