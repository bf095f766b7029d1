"""What several ranks do for test_ranks.py, and how they are started."""

import json
import multiprocessing
import os
import runpy
import socket
import sys

import numpy as np
import torch
from safetensors.torch import save_file

from checkpoint import Snapshot, generator_states, load, save
from lora import whole
from losses import as_scalars, compute_loss, make_rl_loss, merge, summarize
from packing import pack
from policy import OptimizerConfig, Policy
from ranks import join
from tests.conftest import ROOT
from tests.test_losses import sequence_of
from tests.test_policy import sample

LAYOUTS = {
    "whole": (None, 1),
    "a row each": (30, 1),
    "fillers": (30, 2),
}  # tokens of a micro batch, micro batches of a rank at least


def mixed_batch():
    """Branches of 1, 9, 30 and 2 tokens with members of all three components."""
    rng = np.random.default_rng(5)
    branches = [sequence_of(rng, length)[0] for length in (1, 9, 30, 2)]
    for branch in branches:  # near those of a random model, so that trust regions let something through
        branch.logprobs = np.where(branch.sampled, -rng.uniform(4, 8, len(branch)), np.nan)
    branches[2].ce_weights = np.where(branches[2].sampled, 0.0, 0.3)
    branches[1].ref_kl_weights, branches[1].ref_logprobs = branches[1].sampled * 1.0, -rng.uniform(4, 8, 9)
    return branches


def gradients(policy, ranks, layout):
    """(gradients by name, metrics at the lead) of the mixed batch; the gradients stay for a step."""
    tokens, times = LAYOUTS[layout]
    n = len(ranks.train)
    packed = pack(mixed_batch(), 30, tokens, n * times) if ranks.leads else ([], None)
    micro_batches, counts = ranks.deal(*packed)
    summaries = []
    for batch in micro_batches:
        logprobs, entropy, _ = policy(batch)
        loss, summary = compute_loss(batch, logprobs, counts.denominators(), make_rl_loss("ipo"))
        loss.backward()
        summaries.append(summary | {"entropy/mean": summarize(entropy[batch.loss_mask])})
    merged = [summary for summary in ranks.gather(merge(summaries)) if summary]
    named = policy.model.named_parameters() if policy else ()
    return {name: whole(p.grad).clone() for name, p in named}, as_scalars(merge(merged)), len(micro_batches)


def everything(model, out, ranks, nodes=1, start=None):
    """A batch that mixes rl, ce and ref_kl goes through the gradient in several layouts; then come a step, a checkpoint, and the
    weights as the engines get them. What it comes to is in `out`, written by each rank."""
    out.mkdir(parents=True, exist_ok=True)
    policy = Policy(model, OptimizerConfig(1e-2), 10, nodes=nodes) if ranks.trains else None
    if start:
        load(start, policy)
    report = {}
    for layout in LAYOUTS:
        if policy:
            policy.optimizer.zero_grad()
        found, metrics, number = gradients(policy, ranks, layout)
        report[layout] = metrics, number
        if ranks.trains and ranks.rank == ranks.train[0]:
            save_file(found, out / f"{layout}.safetensors")
    if policy:
        report["update"] = policy.step(1)

    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    save(out / "checkpoints", Snapshot(1, generators=generator_states()), policy, Tokenizer(), 1, ranks)
    weights = {name: tensor.contiguous().clone() for name, tensor in ranks.weights(policy)}
    if ranks.samples:
        save_file(weights, out / f"weights_{ranks.rank}.safetensors")
    (out / f"report_{ranks.rank}.json").write_text(json.dumps(report))


def agree_on_ranks(model, out, rollout_ranks):
    """Each rank that samples does so with vLLM; each that trains compares with what was sampled, and makes a step. Three times."""
    from engines.vllm import VLLMEngine

    ranks = join(None, rollout_ranks, "cpu")
    policy = Policy(model, OptimizerConfig(1e-2), 3) if ranks.trains else None
    engine = VLLMEngine(model, max_context=128, ranks=1 if ranks.apart else ranks.world) if ranks.samples else None
    report = []
    for step in range(1, 4):
        branches = sample(engine) if engine else []
        everybodys = [branch for each in ranks.gather(branches) for branch in each]
        packed = pack(everybodys, 64, 64, len(ranks.train)) if ranks.leads else ([], None)
        micro_batches, counts = ranks.deal(*packed)
        differences = [0.0]
        if engine:
            engine.sleep()
        for batch in micro_batches:
            logprobs, _, _ = policy(batch)
            differences += (logprobs - batch.inference_logprobs)[batch.loss_mask].abs().tolist()
            compute_loss(batch, logprobs, counts.denominators(), make_rl_loss("ipo"))[0].backward()
        report.append([len(differences) - 1, max(differences), policy.step(step)["optim/grad_norm"] if policy else 0.0])
        weights = ranks.weights(policy)
        if engine:
            engine.load_weights(weights, step)
        else:
            list(weights)
    if engine:
        engine.close()
    (out / f"{ranks.rank}.json").write_text(json.dumps(report))


def start(number, target, *arguments):
    """target(*arguments) in so many processes, as torchrun would set them up, but quickly: they are forks of one that has all
    imports behind it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.many_ranks"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = {"WORLD_SIZE": number, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(number):
        env = {name: str(value) for name, value in (torchrun | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        processes.append(context.Process(target=_run, args=(env, target, arguments), daemon=True))
        processes[-1].start()
    return processes


def ended(processes, seconds=60):
    """Exit codes, once all have ended."""
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _run(env, target, arguments):
    os.environ.update(env)
    torch.set_num_threads(1)
    target(*arguments)


def step_on_ranks(model, out, rollout_ranks=None, nodes=1, start=None):
    """`everything` on one of several ranks."""
    everything(model, out, join(None, rollout_ranks, "cpu"), nodes, start)


def train_on_ranks(log, *arguments):
    """train.py on one of several ranks; what it says goes to the file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["train.py", *map(str, arguments)]
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
