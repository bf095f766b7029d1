"""Curriculum: draw solved and hopeless tasks less often, and train on no group that has nearly nothing to say.

    python train.py configs/difficulty_pool.py

Shows a sampler with named pools and two named gates; `curriculum/reverse-text/*` in metrics.jsonl tells how many tasks lie
in which pool and what each gate rejected. A task set this small is seen more than once in a longer run.
"""

from config import Config, Source
from curriculum import AdvRangeConfig, DifficultyPoolConfig, Pool
from envs.reverse_text import ReverseText

config = Config(
    sources=[
        Source(
            env=ReverseText(num_tasks=256),
            sampler=DifficultyPoolConfig(
                pools={"hard": Pool(0.25, 0.2), "normal": Pool(0.9, 1.0), "easy": Pool(1.0, 0.1)},
            ),
            gates={
                "low_signal": AdvRangeConfig(reject_min=-0.02, reject_max=0.02),
                "only_failures": AdvRangeConfig(reject_min=-1.0, reject_max=0.0),
            },
        )
    ]
)
