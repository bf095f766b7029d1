"""How much memory it takes to give the engine the trainer's weights: at most the model and two buckets above the steady state.

    python bench/weight_sync.py                  # a random model of 512 MiB, the readable engine
    python bench/weight_sync.py --engine vllm

Three layouts: one process; two ranks that both sample and train, each with half of the model; a rank that samples beside one
that trains. The steady state is that after a first transfer; the peak is that of a second one, after an optimizer step. Linux
alone: the peak of a process's memory is read from /proc.
"""

import argparse
import os
import socket
import sys
import tempfile
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import ranks as module
from loading import quiet

MIB = 2**20


def save_model(folder: str) -> int:
    """A random Qwen3 in float32; returns its bytes."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 10, "vocab_size": 8192}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 512}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True))
    model.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def memory(name: str) -> float:
    """VmRSS (now) or VmHWM (the highest since it was reset) of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def transfer(layout: str, rank: int, env: dict[str, str], folder: str, kind: str, out: str) -> None:
    """One rank's part: two transfers, the second watched."""
    os.environ.update(env)
    torch.set_num_threads(1)
    quiet()
    from loading import load_engine
    from policy import OptimizerConfig, Policy

    ranks = module.join(None, "0" if layout == "apart" else None, "cpu")
    policy = Policy(folder, OptimizerConfig(1e-4), 9) if ranks.trains else None
    engine = None
    if ranks.samples:
        engine = load_engine(kind, Path(folder), "cpu", torch.float32, 64, ranks=1 if ranks.apart else ranks.world)

    def sync(version: int) -> None:
        if engine is None:
            deque(ranks.weights(policy), maxlen=0)
        else:
            engine.sleep()
            engine.load_weights(ranks.weights(policy), version)

    def step(number: int) -> None:
        if policy is not None:
            ids = torch.arange(32)[None]
            policy.model(ids, ids, ids > 0)[0].sum().backward()
            policy.step(number)

    step(1)
    sync(1)
    step(2)
    Path("/proc/self/clear_refs").write_text("5")  # the highest begins anew
    before = memory("VmRSS")
    sync(2)
    peak, after = memory("VmHWM") - before, memory("VmRSS") - before
    job = " and ".join(word for word, does in (("samples", ranks.samples), ("trains", ranks.trains)) if does)
    Path(out, str(rank)).write_text(
        f"{layout}, rank {rank} ({job}): steady {before:.0f} MiB, peak {peak:+.0f} MiB, then {after:+.0f} MiB"
    )
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    engine = parser.parse_args().engine
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as out:
        size = save_model(folder)
        bucket = module.BUCKET_BYTES
        allowed = (size + 2 * bucket) / MIB
        print(f"model {size / MIB:.0f} MiB, bucket {bucket / MIB:.0f} MiB: allowed +{allowed:.0f} MiB")
        for layout, world in (("alone", 1), ("together", 2), ("apart", 2)):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            torchrun = {"WORLD_SIZE": world, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            envs = [torchrun | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world)] if world > 1 else [{}]
            processes = [
                context.Process(
                    target=transfer, args=(layout, rank, {k: str(v) for k, v in env.items()}, folder, engine, out)
                )
                for rank, env in enumerate(envs)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                raise SystemExit(f"{layout}: failed")
            for rank in range(world):
                print(Path(out, str(rank)).read_text())
