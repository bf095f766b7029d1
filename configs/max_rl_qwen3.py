"""MaxRL on GSM8K with Qwen3-0.6B, one GPU. Not run here.

    pip install -e '.[vllm,envs]'
    python train.py configs/max_rl_qwen3.py
    python train.py configs/max_rl_qwen3.py --algo grpo        # the same samples under grpo

Binary rewards and many rollouts a task, which is what the objective is made for (arXiv:2602.02710): a task counts like one over its
pass rate, so watch pass@k beside pass@1 (`python eval.py --model <run's checkpoint> --env gsm8k -k 16`).
"""

from algos.max_rl import MaxRLConfig
from config import Config, Source
from envs.gsm8k import GSM8K

config = Config(
    model="Qwen/Qwen3-0.6B",
    renderer_args={"thinking": False},
    sources=[Source(env=GSM8K(), algo=MaxRLConfig(), group_size=32)],
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
