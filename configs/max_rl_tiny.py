"""MaxRL on sums below 100, right or wrong.

python train.py configs/max_rl_tiny.py
python train.py configs/max_rl_tiny.py --algo grpo         # the same samples under grpo
"""

from algos.max_rl import MaxRLConfig
from config import Config, Source
from envs.arithmetic import Arithmetic

config = Config(sources=[Source(env=Arithmetic(), algo=MaxRLConfig())], steps=60)
