"""OPD on GSM8K: Qwen3-0.6B learns from Qwen3-4B, two GPUs. Not run here.

    pip install -e '.[vllm,envs]'
    CUDA_VISIBLE_DEVICES=1 vllm serve Qwen/Qwen3-4B --port 8001 --max-model-len 2048
    CUDA_VISIBLE_DEVICES=0 python train.py configs/opd_qwen3.py

On-policy distillation as in thinkingmachines.ai/blog/on-policy-distillation and the Qwen3 report (arXiv:2505.09388): the student
samples, the teacher reads, every token gets a signal. The reward is recorded and not used; it should rise toward the teacher's
(`python eval.py --served.name Qwen/Qwen3-4B --served.base-url http://localhost:8001/v1 --env gsm8k`), and `loss/ref_kl` should fall.
"""

from algos.opd import OPDConfig
from config import Config, Source
from envs.gsm8k import GSM8K
from frozen import FrozenModel

teacher = FrozenModel(name="Qwen/Qwen3-4B", base_url="http://localhost:8001/v1")
config = Config(
    model="Qwen/Qwen3-0.6B",
    renderer_args={"thinking": False},
    sources=[Source(env=GSM8K(), algo=OPDConfig(teacher=teacher), group_size=4)],
    steps=150,
    batch_size=256,
    seq_len=1536,
    max_new_tokens=1024,
    micro_batch_tokens=16384,
    lr=5e-6,
)
