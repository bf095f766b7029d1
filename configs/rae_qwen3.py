"""RAE on Kuhn poker with Qwen3-4B, one GPU. Not run here.

    pip install -e '.[vllm]'
    python train.py configs/rae_qwen3.py

Self-play as in SPIRAL (arXiv:2506.24119): one policy on both seats, a baseline for each seat, groups of one. One GPU with 80 GB:
weights, moments and gradients of 4B parameters in float32 are some 64 GB, so the moments wait in host memory while the engine
samples. `eval/kuhn-poker/nash_conv` is the distance to a Nash equilibrium. Plain self-play may cycle; --reference.name,
--reference.base-url and --reference-weight hold it to a served copy of its start.
"""

from algos.rae import RAEConfig
from config import Config, Source
from envs.kuhn_poker import KuhnPoker

config = Config(
    model="Qwen/Qwen3-4B",
    renderer_args={"thinking": False},
    sources=[Source(env=KuhnPoker(), algo=RAEConfig(decay=0.95), group_size=1)],
    steps=200,
    batch_size=256,
    seq_len=2048,
    max_new_tokens=512,
    micro_batch_tokens=8192,
    lr=1e-6,
    schedule="constant",
    checkpoint_activations=True,
    offload_optimizer=True,
    eval_every=10,
)
