"""OPD: on-policy distillation from a served teacher, on reverse-text.

    VLLM_CPU_KVCACHE_SPACE=1 python -m vllm.entrypoints.openai.api_server --model models/tiny-teacher --served-model-name tiny-teacher \\
        --dtype float32 --enforce-eager --port 8001
    python train.py configs/opd_tiny.py

Shows a policy of half-right answers that closes in on its teacher without seeing a reward. Costs a minute on two CPU cores,
the server's start not counted. Expect (measured) a held-out reward from 0.48 to 0.98 and more within 10 steps, the teacher's
being 0.99, and loss/ref_kl, the mean of log pi - log pi_teacher, from 3.4 to below 0.1.
"""

from algos.opd import OPDConfig
from config import Config, Source
from envs.reverse_text import ReverseText
from frozen import FrozenModel

teacher = FrozenModel(name="tiny-teacher", base_url="http://127.0.0.1:8001/v1")
config = Config(sources=[Source(env=ReverseText(), algo=OPDConfig(teacher=teacher))], steps=15, eval_every=5)
