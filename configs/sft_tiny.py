"""SFT: cross-entropy on what a served model samples, on reverse-text.

    VLLM_CPU_KVCACHE_SPACE=1 python -m vllm.entrypoints.openai.api_server --model models/tiny-teacher --served-model-name tiny-teacher \\
        --dtype float32 --enforce-eager --port 8001
    python train.py configs/sft_tiny.py

Shows a warm start by another model's answers; reward/mean is that model's, eval/*/mean the policy's. Costs half a minute on
two CPU cores, the server's start not counted. Expect (measured) a held-out reward from 0.48 to 0.98 and more within 10
steps, and ce/nll, the policy's on the teacher's tokens, from 1.0 to below 0.1.
"""

from algos.sft import SFTConfig
from config import Config, Source
from envs.reverse_text import ReverseText
from frozen import FrozenModel

model = FrozenModel(name="tiny-teacher", base_url="http://127.0.0.1:8001/v1")
config = Config(sources=[Source(env=ReverseText(), algo=SFTConfig(sample_from=model))], steps=15, eval_every=5)
