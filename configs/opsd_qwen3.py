"""OPSD on GSM8K's worked solutions with Qwen3-4B, one GPU. Not run here.

    pip install -e '.[vllm,envs]'
    python train.py configs/opsd_qwen3.py

The policy, shown a task's worked solution, teaches itself without it (SDFT, arXiv:2601.19897; what differs from that paper is told
in algos/opsd.py). Demonstrations of your own: `--env demonstrations --env.path FILE.jsonl`. One GPU with 80 GB.
"""

from algos.opsd import OPSDConfig
from config import Config, Source
from envs.gsm8k import GSM8K

config = Config(
    model="Qwen/Qwen3-4B",
    renderer_args={"thinking": False},
    sources=[Source(env=GSM8K(), algo=OPSDConfig(), group_size=1)],
    steps=100,
    batch_size=128,
    seq_len=2048,
    max_new_tokens=1024,
    micro_batch_tokens=8192,
    lr=2e-6,
    checkpoint_activations=True,
    offload_optimizer=True,
)
