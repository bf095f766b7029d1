"""SFT on GSM8K: Qwen3-0.6B imitates Qwen3-4B's answers, two GPUs. Not run here.

    pip install -e '.[vllm,envs]'
    CUDA_VISIBLE_DEVICES=1 vllm serve Qwen/Qwen3-4B --port 8001 --max-model-len 2048
    CUDA_VISIBLE_DEVICES=0 python train.py configs/sft_qwen3.py

Sequence-level distillation (arXiv:1606.07947): a start before rl or opd. `reward/mean` is the teacher's, `eval/gsm8k/mean` the
student's.
"""

from algos.sft import SFTConfig
from config import Config, Source
from envs.gsm8k import GSM8K
from frozen import FrozenModel

model = FrozenModel(name="Qwen/Qwen3-4B", base_url="http://localhost:8001/v1")
config = Config(
    model="Qwen/Qwen3-0.6B",
    renderer_args={"thinking": False},
    sources=[Source(env=GSM8K(), algo=SFTConfig(sample_from=model), group_size=1)],
    steps=100,
    batch_size=128,
    seq_len=1536,
    max_new_tokens=1024,
    micro_batch_tokens=16384,
    lr=1e-5,
)
