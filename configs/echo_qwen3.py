"""ECHO on the calculator with Qwen3-0.6B, one GPU. Not run here.

    pip install -e '.[vllm]'
    python train.py configs/echo_qwen3.py

GRPO on what the model says and a cross-entropy of weight 0.05, the paper's, on what the tool answers. Numbers of up to three digits,
so that the tool is worth a call. One GPU with 24 GB. `configs/echo_terminal_qwen3.py` is the same in a shell.
"""

from algos.echo import EchoConfig
from config import Config, Source
from envs.calculator import Calculator

config = Config(
    model="Qwen/Qwen3-0.6B",
    renderer_args={"thinking": False},
    sources=[
        Source(env=Calculator(max_number=199, show_tool=True), algo=EchoConfig(roles={"tool": 0.05}), group_size=16)
    ],
    steps=100,
    batch_size=256,
    seq_len=2048,
    max_new_tokens=256,
    micro_batch_tokens=16384,
    lr=1e-6,
    schedule="constant",
)
