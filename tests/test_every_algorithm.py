"""Each of the algorithms for five whole steps on a tiny model: sampled, scored, packed, trained, synchronized.

What is asked of every step: the loss components that the algorithm uses have members and move the weights, the others have
none, and the gradient reaches no other token.
"""

import asyncio
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from algos import ALGORITHMS
from command_line import parse
from config import Config, Source
from engines.hf import HFEngine
from envs import ENVS
from envs.base import Env, user
from envs.calculator import Calculator
from envs.reverse_text import ReverseText, similarity
from frozen import FrozenModel
from losses import as_scalars, compute_loss, make_rl_loss, member_mask, merge
from monitor import Monitor
from packing import pack
from policy import OptimizerConfig, Policy
from renderers import make_renderer
from rollouts import Rollouts
from tests.conftest import ROOT

TINY = ROOT / "models" / "tiny"
STEPS = 5


@dataclass
class Riddle(Env):
    """A proposer writes a text, two solvers reverse it; the proposer earns what they do not."""

    agents: ClassVar = ("proposer", "solver", "solver")
    proposer_solver: ClassVar = True

    def tasks(self, split):
        return ReverseText(num_tasks=64).tasks(split)

    async def play(self, task, proposer, *solvers):
        problem = (await proposer.say(*task.prompt))["content"][:20]
        for solver in solvers:
            reply = await solver.say(user(f"Reverse: {problem}"))
            solver.trace.reward = similarity(reply["content"], problem[::-1])
        proposer.trace.reward = 1 - sum(solver.trace.reward for solver in solvers) / len(solvers)


SERVED = FrozenModel("teacher", "http://localhost:8001/v1")  # an engine in this process stands in for it
CASES = {  # algorithm: knobs, environment, model, the components that it feeds
    "grpo": ({}, ReverseText(), "reverse-text", {"rl"}),
    "max_rl": ({}, ReverseText(), "reverse-text", {"rl"}),
    "rae": ({}, ReverseText(), "reverse-text", {"rl"}),
    "hierarchical_grpo": ({}, Riddle(), "reverse-text", {"rl"}),
    "opd": ({"teacher": SERVED}, ReverseText(), "reverse-text", {"ref_kl"}),
    "opsd": ({"demo_key": "answer"}, ReverseText(), "reverse-text", {"ref_kl"}),
    "sft": ({"sample_from": SERVED}, ReverseText(), "reverse-text", {"ce"}),
    "echo": ({}, Calculator(), "calculator", {"rl", "ce"}),
}


def test_no_algorithm_is_left_out():
    assert set(CASES) == set(ALGORITHMS)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_five_steps(name, tmp_path, monkeypatch):
    knobs, env, folder, components = CASES[name]
    monkeypatch.setitem(ENVS, "riddle", Riddle)
    source = Source(env=env, algo=ALGORITHMS[name].Config(**knobs), group_size=4)
    config = Config(sources=[source], model="tiny", steps=STEPS, batch_size=16, max_new_tokens=80).resolved()
    assert config.check() == []
    path = TINY / folder
    tokenizer = AutoTokenizer.from_pretrained(path)
    policy = Policy(path, OptimizerConfig.of(config), STEPS)
    engine, teacher = HFEngine(path, max_context=config.seq_len), HFEngine(TINY / "base", max_context=config.seq_len)
    asked = []

    def connect(model):
        asked.append(model)
        return teacher

    monitor = Monitor(tmp_path, STEPS, Console(quiet=True))
    rollouts = Rollouts(config, engine, make_renderer("auto", tokenizer, "qwen3"), monitor, connect)
    rl_loss, trained = make_rl_loss("ipo"), []
    with asyncio.Runner() as runner:
        runner.run(rollouts.setup())
        for step in range(1, STEPS + 1):
            branches, metrics = runner.run(rollouts.collect(step))
            assert metrics["rollouts/errored"] == 0 and len(branches) >= 16
            before = {name: tensor.clone() for name, tensor in policy.weights()}
            batches, counts = pack(branches, config.seq_len, config.micro_batch_tokens)
            summaries = []
            for batch in batches:
                logprobs, _, _ = policy(batch)
                logprobs.retain_grad()
                loss, summary = compute_loss(batch, logprobs, counts.denominators(), rl_loss)
                loss.backward()
                summaries.append(summary)
                members = {c: member_mask(c, batch.loss_mask, getattr(batch, f"{c}_weights")) for c in components}
                anywhere = torch.stack(list(members.values())).any(0)
                assert logprobs.grad.isfinite().all() and not logprobs.grad[~anywhere].any()
                for component, mask in members.items():
                    assert logprobs.grad[mask].any(), component
                    # Only echo's ce term lies on tokens that the model has not sampled.
                    assert not (mask & ~batch.loss_mask).any() or (name, component) == ("echo", "ce")
                    assert not (mask & batch.loss_mask).any() or (name, component) != ("echo", "ce")
            scalars = as_scalars(merge(summaries)) | policy.step(step)
            for component in ("rl", "ce", "ref_kl"):
                assert (getattr(counts, component) > 0) == (component in components)
                assert (scalars[f"tokens/{component}"] > 0) == (component in components)
                assert component in components or scalars[f"loss/{component}"] == 0
            assert all(math.isfinite(value) for value in scalars.values()) and scalars["optim/grad_norm"] > 1e-4
            after = dict(policy.weights())
            assert all((after[name] != before[name]).any() for name in before), "every weight has moved"
            engine.load_weights(policy.weights(), version=step)
            trained.append(scalars)
        runner.run(rollouts.close())
    monitor.close()
    assert len(trained) == STEPS and asked == ([SERVED] if name in ("opd", "sft") else [])


def test_two_algorithms_share_a_micro_batch(tmp_path):
    """configs/mixed.py: GRPO's branches and ECHO's lie in one micro batch, and each keeps its own credit."""
    config, _ = parse([str(ROOT / "configs" / "mixed.py"), "--batch-size", "32", "--name", "mixed"])
    assert [type(source.env).__name__ for source in config.sources] == ["Arithmetic", "Calculator"]
    renderer = make_renderer("auto", AutoTokenizer.from_pretrained(config.model), "qwen3")
    monitor = Monitor(tmp_path, 1, Console(quiet=True))
    rollouts = Rollouts(config, HFEngine(config.model, max_context=config.seq_len), renderer, monitor)
    branches, metrics = asyncio.run(rollouts.collect(1))
    monitor.close()
    assert metrics["rollouts/errored"] == 0
    assert {"reward/arithmetic/mean", "reward/calculator/mean", "env/calculator/calls"} <= set(metrics)

    echo = [branch.ce_weights is not None for branch in branches]
    tools = [any(segment.role == "tool" for segment in branch.segments) for branch in branches]
    assert echo == tools and 0 < sum(echo) < len(branches)
    (batch,), counts = pack(branches, config.seq_len, config.micro_batch_tokens)
    kinds = [{echo[i] for i in row.unique().tolist() if i >= 0} for row in batch.sequence_ids]
    assert set().union(*kinds) == {True, False}, "one micro batch holds sequences of both"
    for i, branch in enumerate(branches):
        here = batch.sequence_ids == i
        assert batch.token_ids[here].tolist() == branch.token_ids.tolist()
        expected = np.zeros(len(branch)) if branch.ce_weights is None else branch.ce_weights
        assert batch.ce_weights[here].tolist() == pytest.approx(expected)
        rl = batch.loss_mask[here] & (batch.rl_weights[here] != 0 if batch.rl_weights is not None else True)
        assert batch.advantages[here][rl].all()
    assert counts.ce == sum(int((branch.ce_weights != 0).sum()) for branch in branches if branch.ce_weights is not None)

    # Without the other source's branches the gradient of what is left is the same, up to the shared denominator.
    policy = Policy(config.model, OptimizerConfig.of(config), 1)
    rl_loss = make_rl_loss("ipo")

    def gradient(branches):
        (batch,), _ = pack(branches, config.seq_len)
        logprobs, _, _ = policy(batch)
        logprobs.retain_grad()
        compute_loss(batch, logprobs, counts.denominators(), rl_loss)[0].backward()
        return [logprobs.grad[batch.sequence_ids == i] for i in range(len(branches))]

    together = gradient(branches)
    for kind in (True, False):
        chosen = [i for i in range(len(branches)) if echo[i] == kind]
        for i, alone in zip(chosen, gradient([branches[i] for i in chosen]), strict=True):
            assert torch.allclose(alone, together[i], atol=1e-5)
