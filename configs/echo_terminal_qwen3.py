"""ECHO in the terminal, with Qwen3-4B: GRPO on the commands, cross-entropy on what the shell answers, warnings left out of it.

    python train.py configs/echo_terminal_qwen3.py

Not run here: settings to start from, for one GPU of 80 GB and a machine with bubblewrap. What to look at: reward/mean and
env/terminal/calls; ce/nll, the policy's on the shell's words, which should fall; env/terminal/stopped_commands and rollouts/stop_context,
which should stay near 0. To see what the filter does, compare with `--filter None`; to see what echo does, with `--algo grpo`.
"""

from algos.echo import EchoConfig
from config import Config, Source
from envs.terminal import Terminal

config = Config(
    model="Qwen/Qwen3-4B",
    renderer_args={"thinking": False},  # these jobs need no reasoning, and a turn's worth of it is ten commands
    sources=[
        Source(
            env=Terminal(output_limit=2000),
            algo=EchoConfig(roles={"tool": 0.05}, filter="envs.terminal.drop_warnings"),
            group_size=8,
        )
    ],
    steps=200,
    batch_size=128,
    seq_len=8192,
    max_new_tokens=512,
    lr=1e-6,
    checkpoint_activations=True,
    offload_optimizer=True,
    eval_every=20,
)
