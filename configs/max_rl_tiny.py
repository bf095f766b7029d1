"""MaxRL on sums below 100, right or wrong.

    python train.py configs/max_rl_tiny.py
    python train.py configs/max_rl_tiny.py --algo grpo         # the same number of samples under grpo

Shows binary rewards that are rare at first. Costs two minutes on two CPU cores. Expect (measured, seeds 0, 1, 2) a held-out
pass@1 of 0.18, 0.24, 0.23 at the start, 0.76, 0.88, 0.77 after 10 steps and 0.96, 0.98, 0.99 after 50 to 60. GRPO goes
from the same starts to 0.83, 0.87, 0.81 and 0.98, 0.98, 0.98: with so many rollouts a step the two cannot be told apart here.
"""

from algos.max_rl import MaxRLConfig
from config import Config, Source
from envs.arithmetic import Arithmetic

config = Config(sources=[Source(env=Arithmetic(), algo=MaxRLConfig())], steps=60)
