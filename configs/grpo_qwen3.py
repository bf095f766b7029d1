"""GRPO on GSM8K with Qwen3-0.6B, one GPU. Not run here.

    pip install -e '.[vllm,envs]'
    python train.py configs/grpo_qwen3.py

Groups of 16, a small constant learning rate and no division by the standard deviation, as after DeepSeekMath (arXiv:2402.03300) and
Dr. GRPO (arXiv:2503.20783). One GPU with 24 GB should do: weights, moments and gradients in float32 are some 10 GB, and the
engine takes what is left while it samples. Look at `eval/gsm8k/mean`, and at `mismatch_kl/mean`, which should stay below 1e-3.
"""

from algos.grpo import GRPOConfig
from config import Config, Source
from envs.gsm8k import GSM8K

config = Config(
    model="Qwen/Qwen3-0.6B",
    renderer_args={"thinking": False},
    sources=[Source(env=GSM8K(), algo=GRPOConfig(), group_size=16)],
    steps=200,
    batch_size=512,
    seq_len=1536,
    max_new_tokens=1024,
    micro_batch_tokens=16384,
    lr=1e-6,
    schedule="constant",
    eval_every=20,
    eval_samples=256,
)
