"""Two hundred episodes of several turns at once, step after step: nothing waits forever, and memory stays flat.

    python bench/many_episodes.py [hf|vllm] [steps]

Prints, every tenth step, the seconds of a step and the memory of the process. The first step builds caches; compare the rest.
"""

import asyncio
import os
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from rich.console import Console
from transformers import AutoTokenizer

from config import Config, Source
from engines.hf import HFEngine
from engines.vllm import VLLMEngine
from envs import ENVS
from envs.base import Env, user
from losses import compute_loss, make_rl_loss
from monitor import Monitor
from packing import pack
from policy import OptimizerConfig, Policy, model_path
from renderers import make_renderer
from rollouts import Rollouts
from traces import Task

EPISODES, TURNS = 200, 4


@dataclass
class Chat(Env):
    """Four turns about nothing; the reward is a checksum of what the model says, so groups never come to agree."""

    def tasks(self, split):
        return [Task(f"{split}-{i}", [user(f"Say something about {i}.")]) for i in range(1000)]

    async def play(self, task, agent):
        said = [
            (await agent.say(*(task.prompt if turn == 0 else [user("Go on.")])))["content"] for turn in range(TURNS)
        ]
        agent.trace.reward = zlib.crc32("".join(said).encode()) / 2**32


def resident_mib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(kind: str = "hf", steps: int = 50) -> None:
    """Train on the chats for so many steps, and print what every tenth costs."""
    ENVS["chat"] = Chat
    path = model_path("tiny", "reverse-text")
    config = Config(
        sources=[Source(env=Chat(), group_size=8)], batch_size=EPISODES, steps=steps, max_new_tokens=24
    ).resolved()
    renderer = make_renderer("qwen3", AutoTokenizer.from_pretrained(path), "qwen3")
    policy = Policy(path, OptimizerConfig.of(config), steps)
    engine = (VLLMEngine if kind == "vllm" else HFEngine)(path, max_context=config.seq_len)
    rl_loss = make_rl_loss(**config.to_dict()["loss"])
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner, open(os.devnull, "w") as quiet:
        rollouts = Rollouts(config, engine, renderer, Monitor(Path(folder) / "run", steps, Console(file=quiet)))
        for step in range(1, steps + 1):
            start = time.perf_counter()
            branches, metrics = runner.run(rollouts.collect(step))
            engine.sleep()
            micro_batches, counts = pack(branches, config.seq_len, config.micro_batch_tokens)
            for micro_batch in micro_batches:
                loss, _ = compute_loss(micro_batch, policy(micro_batch)[0], counts.denominators(), rl_loss)
                loss.backward()
            policy.step(step)
            engine.load_weights(policy.weights(), step)
            if step == 1 or step % 10 == 0:
                print(
                    f"{kind} step {step}: {time.perf_counter() - start:.1f} s, {metrics['rollouts/finished']:.0f} episodes, "
                    f"{counts.tokens} tokens, {resident_mib():.0f} MiB",
                    flush=True,
                )
    engine.close()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
    main(*(kind for kind in sys.argv[1:2]), *(int(steps) for steps in sys.argv[2:3]))
