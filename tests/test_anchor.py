"""The anchor: rl and ref_kl on the same tokens."""

import asyncio
import inspect
import re

import numpy as np
import pytest
import torch

from algos import ALGORITHMS
from algos.anchor import Anchored
from command_line import parse
from config import Config, Source
from engines.base import Engine
from envs.reverse_text import ReverseText
from frozen import FrozenModel
from losses import compute_loss, make_rl_loss
from packing import pack
from rollouts import prune
from tests.test_algos import group_of, trace_of

START = FrozenModel("start", "http://localhost:8001/v1")
RL = [name for name, algorithm in ALGORITHMS.items() if algorithm.action_loss == "rl"]


class Reference(Engine):
    """Gives every token of a context the same log-prob."""

    def __init__(self, logprob):
        super().__init__(1000)
        self.logprob = logprob

    async def score(self, token_ids, temperature=1.0):
        return np.array([np.nan] + [self.logprob] * (len(token_ids) - 1), np.float32)


def credited(name, rewards, weight=None, logprob=-1.0):
    """Traces of one group, scored by the algorithm with or without an anchor, pruned."""
    knobs = {} if weight is None else {"reference": START, "reference_weight": weight}
    algorithm = ALGORITHMS[name](ALGORITHMS[name].Config(**knobs), Engine(1000), None, lambda model: Reference(logprob))
    traces = [trace_of(reward, tokens=2 + i, agent="solver") for i, reward in enumerate(rewards)]
    episodes = group_of(*traces)
    if name == "hierarchical_grpo":  # solvers meet within an episode
        episodes = [episodes[0]]
        episodes[0].traces = traces

    async def score():
        await algorithm.setup()
        for episode in episodes:
            await algorithm.finalize_episode(episode)
        await algorithm.finalize_group(episodes)
        await algorithm.close()

    asyncio.run(score())
    return [branch for trace in traces for branch in trace.branches if prune(branch)]


def gradient_of(branches, logprobs):
    """(gradient [tokens] in the order of the branches, counts) at the given log-probs of the trainer."""
    (batch,), counts = pack(branches, 1000)
    spread, order = torch.zeros(batch.token_ids.shape), []
    for i in range(len(branches)):
        order.append((batch.sequence_ids == i).nonzero(as_tuple=True))
    rows, columns = (torch.cat(part) for part in zip(*order, strict=True))
    spread[rows, columns] = torch.tensor(logprobs, dtype=torch.float32)
    spread.requires_grad_()
    compute_loss(batch, spread, counts.denominators(), make_rl_loss("ipo"))[0].backward()
    return spread.grad[rows, columns].numpy(), counts


def test_docstring_example():
    (paragraph,) = [p for p in inspect.getmodule(Anchored).__doc__.split("\n\n") if p.startswith("Example.")]
    reference, own, signal, beta, advantage = map(float, re.findall(r"-?\d+(?:\.\d+)?", paragraph))
    (branch,) = credited("rae", [0.0], weight=beta, logprob=reference)  # advantage 0: nothing but the anchor
    branch.logprobs[branch.sampled] = own
    gradient, _ = gradient_of([branch], np.where(branch.sampled, own, 0.0).tolist())
    assert reference - own == pytest.approx(signal) and beta * signal == pytest.approx(advantage)
    assert gradient[branch.sampled] * branch.sampled.sum() == pytest.approx(-advantage)


@pytest.mark.parametrize("name", RL)
def test_gradients_sum_over_the_same_tokens(name):
    """With an anchor the gradient is the algorithm's own plus beta times the reference's, token by token."""
    rewards, beta = [1.0, 0.0, 0.25], 0.3
    logprobs = np.random.default_rng(0).uniform(-1.2, -0.8, sum(4 + i for i in range(len(rewards)))).tolist()
    plain, counts = gradient_of(credited(name, rewards), logprobs)
    both, anchored = gradient_of(credited(name, rewards, beta), logprobs)
    only = credited(name, rewards, beta)
    for branch in only:
        branch.rl_weights = np.zeros(len(branch))
    reference, _ = gradient_of(only, logprobs)
    sampled = np.concatenate([branch.sampled for branch in only])
    assert counts.ref_kl == 0 and anchored.rl == counts.rl and anchored.ref_kl == sampled.sum()
    assert both == pytest.approx(plain + reference, abs=1e-6)
    assert plain[sampled].all() and reference[sampled].all() and not both[~sampled].any()
    expected = -beta * (-1.0 - np.array(logprobs)) * np.exp(np.array(logprobs) + 1.0) / sampled.sum()
    assert reference[sampled] == pytest.approx(expected[sampled], abs=1e-6)


def test_equal_rewards_still_teach():
    """Without an anchor the group is dropped, with one its tokens feed ref_kl alone."""
    assert credited("grpo", [1.0, 1.0]) == []
    branches = credited("grpo", [1.0, 1.0], 0.1)
    assert len(branches) == 2
    for branch in branches:
        assert not branch.rl_weights[branch.sampled].any() and (branch.ref_kl_weights[branch.sampled] == 0.1).all()
        assert not branch.ref_kl_weights[~branch.sampled].any()


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in RL])
def test_the_others_have_no_anchor(name, capsys):
    with pytest.raises(SystemExit):
        parse(["--algo", name, "--reference-weight", "0.1"])
    assert "--reference-weight belongs to --algo " in capsys.readouterr().err


SERVED = ["--reference.name", "start", "--reference.base-url", "http://localhost:8001/v1"]
REFUSED = [
    (["--reference-weight", "0.1"], "--reference-weight 0.1: needs --reference.name"),
    (SERVED, "--reference-weight None: must be a positive number"),
    ([*SERVED, "--reference-weight", "0"], "--reference-weight 0.0: must be a positive number"),
    ([*SERVED, "--reference-weight", "nan"], "--reference-weight nan: must be a positive number"),
    ([*SERVED, "--reference-weight", "1", "--temperature", "0.7"], "--temperature 0.7"),
    (["--reference.name", "start", "--reference-weight", "1"], "needs --reference.base-url"),
    (["--reference.name", "policy", "--reference-weight", "1"], "--reference policy"),
    (["--reference.base-url", "http://localhost:1/v1", "--reference-weight", "1"], "needs --reference.name"),
]


@pytest.mark.parametrize(("args", "message"), REFUSED)
@pytest.mark.parametrize("name", ["grpo", "rae"])
def test_half_an_anchor_is_refused(name, args, message, capsys):
    with pytest.raises(SystemExit):
        parse(["--algo", name, *args])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", RL)
def test_the_reference_is_asked_for_before_the_run(name):
    config = ALGORITHMS[name].Config(reference=START, reference_weight=0.1)
    assert config.frozen_models() == [("reference", START, "score")]
    assert ALGORITHMS[name].Config().frozen_models() == []
    run = Config(sources=[Source(env=ReverseText(), algo=config)])
    assert ("reference", START, "score") in run.frozen_models()
    if name != "hierarchical_grpo":
        run.resolved().check()
