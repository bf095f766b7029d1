"""GRPO on reverse-text: what `python train.py` runs by default.

python train.py configs/grpo_tiny.py
"""

from algos.grpo import GRPOConfig
from config import Config, Source
from envs.reverse_text import ReverseText

config = Config(sources=[Source(env=ReverseText(), algo=GRPOConfig())], steps=30)
