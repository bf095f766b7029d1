"""Hierarchical GRPO on proposer-solver with Qwen3-4B, one GPU. Not run here.

    pip install -e '.[vllm]'
    python train.py configs/hierarchical_grpo_qwen3.py

Eight problems from one source task, eight solvers on each; the proposer earns most where half of the solvers pass, as in proposer
and solver self-play (R-Zero, arXiv:2508.05004). One GPU with 80 GB. Watch `reward/proposer-solver/proposer` and
`reward/proposer-solver/solver`, and the solver on fixed problems in `eval/`: on-policy its reward also moves with what is
proposed.
"""

from algos.hierarchical_grpo import HierarchicalGRPOConfig
from config import Config, Source
from envs.proposer_solver import ProposerSolver

config = Config(
    model="Qwen/Qwen3-4B",
    renderer_args={"thinking": False},
    sources=[Source(env=ProposerSolver(n=8), algo=HierarchicalGRPOConfig(), group_size=8)],
    steps=200,
    batch_size=576,
    seq_len=2048,
    max_new_tokens=1024,
    micro_batch_tokens=8192,
    lr=1e-6,
    schedule="constant",
    checkpoint_activations=True,
    offload_optimizer=True,
)
