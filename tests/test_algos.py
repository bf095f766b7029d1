"""The algorithms as a whole: docstring examples, reference scoring, echo's choice of tokens, what configs refuse, state.

The formulas are held against golden values in test_golden_credit.py.
"""

import asyncio
import dataclasses
import inspect
import json
import re
import subprocess
import sys
import textwrap
from fractions import Fraction

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import algos.base
from algos import ALGORITHMS
from algos.advantage import GroupRelativeConfig, token_counts
from command_line import parse
from config import Config, Run, Source
from engines.base import Engine, Sampling
from engines.hf import HFEngine
from envs import ENVS, Env
from envs.base import user
from frozen import FrozenModel
from losses import compute_loss, make_rl_loss
from make_tiny import make_tokenizer
from monitor import Monitor
from packing import pack
from policy import OptimizerConfig, Policy
from renderers import make_renderer
from rollouts import Queue, Rollouts
from traces import Episode, Task, Trace

SERVED = FrozenModel("big", "http://localhost:8001/v1")


class Reader(Engine):
    """Scores token i as -(i + 1) / 1000, whatever stands before it, and remembers what it was asked."""

    def __init__(self, max_context: int = 1000) -> None:
        super().__init__(max_context)
        self.asked: list[list[int]] = []

    async def score(self, token_ids, temperature=1.0):
        assert temperature == 1.0
        self.asked.append(list(token_ids))
        return np.array([np.nan] + [-(i + 1) / 1000 for i in token_ids[1:]], np.float32)


def algorithm(name, *, policy=None, renderer=None, teacher=None, **knobs):
    algo = ALGORITHMS[name](ALGORITHMS[name].Config(**knobs), policy, renderer, lambda model: teacher)
    algo.teacher = teacher
    return algo


def trace_of(reward=0.0, tokens=2, prompt=2, **fields):
    trace = Trace(reward=reward, **fields)
    trace.add_turn(range(prompt), range(10, 10 + tokens), [-1.0] * tokens)
    return trace


def group_of(*traces, task=None):
    return [Episode(str(i), "env", task or Task("t", []), [trace]) for i, trace in enumerate(traces)]


def advantages(algo, rewards):
    traces = [trace_of(reward) for reward in rewards]
    asyncio.run(algo.finalize_group(group_of(*traces)))
    return [None if t.branches[0].advantages is None else t.branches[0].advantages[-1] for t in traces]


def step_of(branches, logprobs):
    """(metrics, gradient [tokens]) of the loss of one row, at the given log-probs of the trainer."""
    (batch,), counts = pack(branches, 1000)
    logprobs = torch.tensor([logprobs], requires_grad=True)
    loss, metrics = compute_loss(batch, logprobs, counts.denominators(), make_rl_loss("ipo"))
    loss.backward()
    return {name: float(total) for name, (total, *_) in metrics.items()}, logprobs.grad[0].tolist(), counts


# Docstrings


def numbers_of(name):
    """The numbers in the "Example." paragraph of an algorithm's docstring."""
    text = inspect.getmodule(ALGORITHMS[name]).__doc__
    (paragraph,) = [p for p in text.split("\n\n") if p.startswith("Example.")]
    return [float(Fraction(n)) for n in re.findall(r"-?\d+(?:\.\d+|/\d+)?", paragraph)]


@pytest.mark.parametrize("name", ["grpo", "max_rl", "hierarchical_grpo"])
def test_docstring_example_of_group_credit(name):
    a, b, c, mean, *expected = numbers_of(name)
    traces = [trace_of(reward, agent="solver") for reward in (a, b, c)]
    episodes = [Episode("e", "env", Task("t", []), traces)]
    asyncio.run(algorithm(name).finalize_group(episodes))
    assert np.mean([a, b, c]) == pytest.approx(mean)
    assert [trace.branches[0].advantages[-1] for trace in traces] == pytest.approx(expected)


def test_docstring_example_of_rae():
    decay, *numbers = numbers_of("rae")
    rewards, baselines, expected = numbers[:3], numbers[3:6], numbers[6:]
    algo = algorithm("rae", decay=decay)
    for reward, baseline, advantage in zip(rewards, baselines, expected, strict=True):
        assert algo.baselines.get("agent", 0.0) == baseline
        assert advantages(algo, [reward]) == [advantage]


@pytest.mark.parametrize("name", ["opd", "opsd"])
def test_docstring_example_of_distillation(name):
    numbers = numbers_of(name)
    reference, own, signals = numbers[:3], numbers[3:6], numbers[6:]
    trace = trace_of(0.0, tokens=3, prompt=1)
    branch = trace.branches[0]
    branch.logprobs[1:] = own
    branch.ref_logprobs = np.array([0.0, *reference])
    asyncio.run(algorithm(name, teacher=None).finalize_group(group_of(trace)))
    _, gradient, counts = step_of([branch], [0.0, *own])
    assert counts.denominators() == {"rl": 0.0, "ce": 0, "ref_kl": 3}
    assert [-3 * g for g in gradient[1:]] == pytest.approx(signals)


def test_docstring_example_of_sft():
    numbers = numbers_of("sft")
    own, losses, mean = numbers[:3], numbers[3:6], numbers[6]
    trace = trace_of(0.0, tokens=3, prompt=1)
    asyncio.run(algorithm("sft").finalize_group(group_of(trace)))
    metrics, _, counts = step_of(trace.branches, [0.0, *own])
    assert [-logprob for logprob in own] == losses and counts.ce == 3 and counts.rl == 0
    assert metrics["loss/ce"] == pytest.approx(mean)


def tool_trace(reward=0.0, observed=3, role="tool"):
    """prompt 1, sampled 1, `observed` tokens of a role, then a turn's scaffold 1, sampled 1."""
    trace = Trace(reward=reward)
    trace.add_turn([1], [2], [-1.0], roles=["user"])
    prompt = [1, 2, *range(20, 20 + observed), 3]
    roles, content = [role] * observed + ["assistant"], [True] * observed + [False]
    trace.add_turn(prompt, [4], [-1.0], roles=roles, is_content=content)
    return trace


def test_docstring_example_of_echo():
    numbers = numbers_of("echo")
    observed, alpha, losses, mean = numbers[:3], numbers[3], numbers[4:7], numbers[7]
    trace = tool_trace()
    algo = algorithm("echo", roles={"tool": alpha})
    (episode,) = group_of(trace)
    asyncio.run(algo.finalize_episode(episode))
    asyncio.run(algo.finalize_group([episode]))
    metrics, _, counts = step_of(trace.branches, [0.0, -1.0, *observed, -1.0, -1.0])
    assert losses == pytest.approx([-alpha * logprob for logprob in observed]) and counts.ce == 3
    assert metrics["loss/ce"] == pytest.approx(mean)


# Credit


def test_rewards_that_are_no_numbers_are_left_out_of_the_mean():  # known fault A15
    for bad in (None, float("nan"), float("inf")):
        assert advantages(algorithm("grpo"), [1.0, bad, 0.0, None]) == [0.5, None, -0.5, None]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [3, -1, -1, -1]),
        ([0, 0], [0, 0]),
        ([1], [0]),
        ([-1, 1], [0, 0]),
        ([-2, 1], [0, 0]),
        ([1e-6, 0, 0], [2, -1, -1]),
    ],
)
def test_max_rl_at_its_edges(rewards, expected):  # known fault A24
    assert advantages(algorithm("max_rl"), rewards) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_group_without_anything_usable_is_left_alone(name):
    traces = [trace_of(None), trace_of(1.0, error="boom"), trace_of(1.0, trainable=False)]
    episodes = group_of(*traces)
    algo = algorithm(name, teacher=Reader() if name == "opd" else None)
    for episode in episodes:
        asyncio.run(algo.finalize_episode(episode))
    asyncio.run(algo.finalize_group(episodes))
    for trace in traces:
        (branch,) = trace.branches
        assert branch.advantages is branch.ce_weights is branch.ref_kl_weights is branch.ref_logprobs is None


def test_rae_keeps_its_baselines_in_the_checkpoint():
    first, second = algorithm("rae", decay=0.5), algorithm("rae", decay=0.5)
    assert advantages(first, [1.0, 1.0]) == [1.0, 0.5]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert advantages(first, [0.0]) == advantages(second, [0.0]) == [-0.75]


def test_input_that_two_branches_share_counts_once():
    trace = Trace()
    trace.add_turn([1, 2, 3], [4, 5], [0.0, 0.0])
    trace.add_turn([1, 2, 3, 4, 9, 9], [6], [0.0])  # the template rewrote the history behind [1, 2, 3, 4]
    config = GroupRelativeConfig(length_penalty="linear")
    assert len(trace.branches) == 2
    assert token_counts(trace, config) == (3, 3 + 2)
    assert token_counts(trace, dataclasses.replace(config, length_penalty="linear-subagent")) == (3, 3 + 6)


@pytest.mark.parametrize("name", ["grpo", "max_rl", "echo", "hierarchical_grpo"])
def test_length_weighted_advantages_sum_to_zero_over_tokens(name):
    traces = [trace_of(reward, tokens) for reward, tokens in ((1.0, 2), (0.0, 5), (0.25, 9))]
    algo = algorithm(name, length_penalty="linear", length_weighted_baseline=True)
    asyncio.run(algo.finalize_group(group_of(*traces)))
    streams = [trace.branches[0].advantages for trace in traces]
    assert sum(stream.sum() for stream in streams) == pytest.approx(0.0, abs=1e-12)
    assert any(stream.any() for stream in streams)


# Reference scoring


@pytest.mark.parametrize("name", ["opd", "opsd"])
def test_every_sampled_token_gets_its_reference(name):  # known fault A16
    renderer = make_renderer("qwen3", make_tokenizer())
    policy, teacher = Reader(), Reader()
    algo = algorithm(name, policy=policy, renderer=renderer, teacher=teacher if name == "opd" else None)
    asyncio.run(algo.setup())
    for prompt, tokens in ((1, 1), (1, 5), (4, 1), (7, 5)):
        trace = trace_of(1.0, tokens, prompt)
        trace.add_turn([50, 51], [52], [-1.0])  # a second branch
        asyncio.run(algo.finalize_episode(*group_of(trace, task=Task("t", [], {"demonstration": "so"}))))
        for branch in trace.branches:
            assert branch.ref_logprobs[branch.sampled] == pytest.approx(-(branch.token_ids[branch.sampled] + 1) / 1000)
    asked = teacher.asked if name == "opd" else policy.asked
    assert len(asked) == 8 and all(ids[-1] in (10, 14, 52) for ids in asked)
    asyncio.run(algo.close())


def test_a_frozen_copy_of_the_policy_gives_no_signal(tiny_path):  # known fault A16, with real models
    policy, teacher = HFEngine(tiny_path), HFEngine(tiny_path)
    algo = algorithm("opd", policy=policy, teacher=teacher)
    prompts = [list(b"abcdefgh"), list(b"ab"), list(b"abcd")]

    async def play(i, prompt, tokens):
        episode = Episode(str(i), "env", Task("t", []), [Trace(reward=0.0)])
        with policy.playing(episode.id):
            reply = await policy.generate(prompt, Sampling(tokens, key=(i,)))
            episode.traces[0].add_turn(prompt, reply.token_ids, reply.logprobs)
            await algo.finalize_episode(episode)
        return episode

    async def run():
        plays = [play(i, prompt, tokens) for i, (prompt, tokens) in enumerate(zip(prompts, (5, 5, 1), strict=True))]
        episodes = await asyncio.gather(*plays)
        await algo.finalize_group(episodes)
        return [episode.traces[0].branches[0] for episode in episodes]

    branches = asyncio.run(run())
    for branch in branches:
        assert branch.ref_logprobs[branch.sampled] == pytest.approx(branch.logprobs[branch.sampled], abs=1e-5)
    (batch,), counts = pack(branches, 64)
    logprobs, _, _ = Policy(tiny_path, OptimizerConfig(1e-3), 1)(batch)
    assert counts.ref_kl == 11 and len(batch.token_ids) == 2  # two of them share a row
    assert (batch.ref_logprobs - logprobs)[batch.loss_mask].abs().max() < 1e-5


@pytest.mark.parametrize(
    ("scores", "match"),
    [(lambda ids: np.zeros(len(ids) - 1), "shape"), (lambda ids: np.full(len(ids), -np.inf), "finite")],
)
def test_a_reference_that_misbehaves_ends_the_episode(scores, match):
    class Broken(Reader):
        async def score(self, token_ids, temperature=1.0):
            return scores(token_ids)

    algo = algorithm("opd", policy=Reader(), teacher=Broken())
    with pytest.raises(ValueError, match=match):
        asyncio.run(algo.finalize_episode(*group_of(trace_of())))


def test_hint_and_sample_must_fit_the_context():
    renderer = make_renderer("qwen3", make_tokenizer())
    algo = algorithm("opsd", policy=Reader(max_context=30), renderer=renderer, template="{demonstration}")
    asyncio.run(algo.setup())
    asyncio.run(algo.finalize_episode(*group_of(trace_of(), task=Task("t", [], {"demonstration": "so"}))))
    with pytest.raises(ValueError, match="do not fit the reference's context of 30"):
        asyncio.run(algo.finalize_episode(*group_of(trace_of(), task=Task("t", [], {"demonstration": "so" * 20}))))
    with pytest.raises(ValueError, match="--demo-key"):
        asyncio.run(algo.finalize_episode(*group_of(trace_of())))


# What stands before the first user turn, as a chat template writes it: nothing, a BOS token, a default block that a system
# message follows, one that holds it, one that it replaces.
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
REST = "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
BLOCK = "<|im_start|>system\nYou are a model."
TEMPLATES = {
    "bare": TURNS,
    "bos": "<|endoftext|>" + TURNS,
    "followed": "<|endoftext|>" + BLOCK + "<|im_end|>\n" + TURNS,
    "holding": "<|endoftext|>"
    + REST
    + BLOCK
    + "\n\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<|im_end|>\n"
    + TURNS.replace("messages", "rest"),
    "replaced": "{% if messages[0].role != 'system' %}" + BLOCK + "<|im_end|>\n{% endif %}" + TURNS,
}


@pytest.mark.parametrize("own_system", [False, True])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_hint_joins_a_rollout_that_stays_as_it_was(kind, own_system):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES[kind]
    if kind in ("bos", "followed", "holding"):
        tokenizer.bos_token = "<|endoftext|>"
    renderer, policy = make_renderer("default", tokenizer), Reader()
    algo = algorithm("opsd", policy=policy, renderer=renderer, template="Like this: {demonstration}")
    asyncio.run(algo.setup())
    messages = [{"role": "system", "content": "Be brief."}] * own_system + [user("Hi")]
    prompt = renderer.render_ids(messages)
    trace = Trace(reward=1.0)
    trace.add_turn(prompt, [70, 71], [-1.0, -1.0])
    asyncio.run(algo.finalize_episode(*group_of(trace, task=Task("t", [], {"demonstration": "{ho} <|im_end|>"}))))
    (ids,) = policy.asked
    text = tokenizer.decode(ids)
    assert (
        ids[-2:] == [70, 71]
        and text.count("Like this: {ho} <|im_end|>") == 1
        and text.count("<|im_end|>\n<|im_end|>") == 0
    )
    assert text.count("<|endoftext|>") == int(kind in ("bos", "followed", "holding"))
    assert text.startswith("<|endoftext|>") == (kind in ("bos", "followed", "holding"))
    assert text.count("You are a model.") == int(
        kind in ("followed", "holding") or (kind == "replaced" and not own_system)
    )
    (start,) = [i for i in range(len(ids)) if tokenizer.decode(ids[i : i + 10]) == "Like this:"]
    removed = [ids[:a] + ids[b:] for a in range(start + 1) for b in [a + len(ids) - len(prompt) - 2]]
    assert [*prompt, 70, 71] in removed  # the rollout is all there, in order, around one insertion
    assert trace.branches[0].ref_logprobs[-2:] == pytest.approx([-0.071, -0.072])
    if not own_system and kind != "replaced":  # then it is what the template itself writes
        hint = {"role": "system", "content": "Like this: {ho} <|im_end|>"}
        assert ids == [*renderer.render_ids([hint, user("Hi")]), 70, 71]


def test_a_format_without_system_messages_takes_no_hint():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURNS
    algo = algorithm("opsd", policy=Reader(), renderer=make_renderer("default", tokenizer))
    with pytest.raises(ValueError, match="--hint-renderer auto: opsd's hint is a system message"):
        asyncio.run(algo.setup())


def test_the_hint_can_have_a_renderer_of_its_own():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES["replaced"]
    policy = Reader()
    algo = algorithm(
        "opsd", policy=policy, renderer=make_renderer("default", tokenizer), hint_renderer="qwen3", demo_key="answer"
    )
    asyncio.run(algo.setup())
    asyncio.run(algo.finalize_episode(*group_of(trace_of(), task=Task("t", [], {"answer": 42}))))
    hint = {"role": "system", "content": algo.config.template.replace("{demonstration}", "42")}
    assert policy.asked == [[*make_renderer("qwen3", tokenizer).render_ids([hint]), 0, 1, 10, 11]]


@pytest.mark.parametrize("name, flag, slot", [("opd", "teacher", "teacher"), ("sft", "sample_from", "sampler")])
def test_setup_connects_to_the_frozen_model_that_the_config_names(name, flag, slot):
    asked = []
    config = ALGORITHMS[name].Config(**{flag: SERVED})
    algo = ALGORITHMS[name](config, connect=lambda model: (asked.append(model), Reader())[1])
    asyncio.run(algo.setup())
    assert asked == [SERVED] and isinstance(getattr(algo, slot), Reader)


# Echo


def test_echo_trains_on_observations_though_all_rewards_are_equal():  # known fault A25
    kept = {}
    for name in ("echo", "grpo"):
        episodes = group_of(*[tool_trace(1.0, observed=6) for _ in range(2)])
        algo = algorithm(name)
        for episode in episodes:
            asyncio.run(algo.finalize_episode(episode))
        asyncio.run(algo.finalize_group(episodes))
        queue = Queue(batch_size=2, constant=True)
        kept[name] = queue.add([episode.traces[0] for episode in episodes]), queue.missing()
        if name == "echo":
            _, gradient, counts = step_of(episodes[0].traces[0].branches, [-1.0] * 10)
            assert counts.denominators() == {"rl": 0.0, "ce": 6, "ref_kl": 0}
            assert [g != 0 for g in gradient] == [False] * 2 + [True] * 6 + [False] * 2
    assert kept == {"echo": (2, 0), "grpo": (0, 2)}


def test_echo_leaves_the_prompt_of_every_branch_alone():
    trace = tool_trace(1.0)
    trace.add_turn(
        [1, 9, 20, 21, 22, 3], [5], [-1.0], roles=["user"] + ["tool"] * 4 + ["assistant"]
    )  # a rewritten history
    asyncio.run(algorithm("echo").finalize_episode(*group_of(trace)))
    first, second = trace.branches
    assert first.ce_weights.tolist() == [0, 0, 0.1, 0.1, 0.1, 0, 0] and second.ce_weights is None


def keep_all(trace):
    return [np.ones(len(branch)) for branch in trace.training_branches()]


def drop_words(trace, *, words):
    assert trace.messages and np.isfinite(trace.branches[0].logprobs[1])  # the raw trace
    return [~np.isin(branch.token_ids, words) for branch in trace.training_branches()]


def one_short(trace):
    return [mask[:-1] for mask in keep_all(trace)]


def one_missing(trace):
    return keep_all(trace)[:-1]


def half(trace):
    return [mask / 2 for mask in keep_all(trace)]


def test_echo_filter_only_narrows():
    def weights(filter, **kwargs):
        trace = tool_trace(1.0)
        trace.messages = [user("Hi")]
        algo = algorithm("echo", filter=f"{__name__}.{filter}", filter_kwargs=kwargs)
        asyncio.run(algo.finalize_episode(*group_of(trace)))
        return trace.branches[0].ce_weights.tolist()

    assert weights("keep_all") == [0, 0, 0.1, 0.1, 0.1, 0, 0]
    assert weights("drop_words", words=[20, 22]) == [0, 0, 0, 0.1, 0, 0, 0]
    for wrong in ("one_short", "one_missing", "half"):
        with pytest.raises(ValueError, match=f"--filter: {wrong} gave"):
            weights(wrong)


# Configs


def source_of(algo, env=None, group_size=4):
    return Source(env=env or ENVS["reverse-text"](), algo=algo, group_size=group_size)


def check(name, knobs, env=None, group_size=4, others=(), **run):
    source = source_of(ALGORITHMS[name].Config(**knobs), env, group_size)
    return source.algo.check(source, Config(sources=[source, *others], **run))


class Stream(Env):
    def tasks(self, split):
        return iter([Task("a", [], {})])


class Proposing(Env):
    proposer_solver = True
    agents = ("proposer", "solver")


REFUSED = [
    ("grpo", {"num_turns_weight": -0.1}, {}, "--num-turns-weight -0.1"),
    ("grpo", {"num_output_tokens_weight": float("nan")}, {}, "--num-output-tokens-weight nan"),
    ("max_rl", {"subagent_token_weight": float("inf")}, {}, "--subagent-token-weight inf"),
    ("rae", {"decay": 1.0}, {}, "--decay 1.0"),
    ("rae", {"decay": float("nan")}, {}, "--decay nan"),
    ("hierarchical_grpo", {}, {}, "--algo hierarchical_grpo: ReverseText is no proposer-solver"),
    ("hierarchical_grpo", {"episode_agents": ("judge",)}, {"env": Proposing()}, "--episode-agents judge"),
    ("opd", {}, {}, "opd needs --teacher.base-url: the teacher is served elsewhere"),
    ("opd", {"teacher": "policy"}, {}, "--teacher policy"),
    ("opd", {"teacher": FrozenModel("policy", SERVED.base_url)}, {}, "--teacher policy"),
    ("opd", {"teacher": FrozenModel("", SERVED.base_url)}, {}, "opd needs --teacher.name"),
    ("opd", {"teacher": FrozenModel("big", "localhost:8001")}, {}, "--teacher.base-url localhost:8001"),
    ("opd", {"teacher": FrozenModel("big", "http://localhost:80o1/v1")}, {}, "80o1/v1: is no address of a server"),
    ("opd", {"teacher": FrozenModel("big", "http://a:1/v1,http://b:99999/v1")}, {}, "b:99999/v1: is no address"),
    ("opd", {"teacher": FrozenModel("big", "http:///v1")}, {}, "http:///v1: is no address of a server"),
    ("opd", {"teacher": SERVED}, {"temperature": 0.7}, "--temperature 0.7: opd needs 1"),
    ("opsd", {"demo_key": "answer"}, {"temperature": 0.7}, "--temperature 0.7: opsd needs 1"),
    ("opsd", {}, {}, "--demo-key demonstration: task .* its info has ..answer.."),
    ("opsd", {"demo_key": "answer", "template": "no place"}, {}, "--template 'no place'"),
    ("sft", {}, {}, "sft needs --sample-from.base-url"),
    ("sft", {"sample_from": "policy"}, {}, "--sample-from policy"),
    ("echo", {"roles": {"tol": 0.1}}, {}, "--roles tol=0.1: there is no such role"),
    ("echo", {"roles": {"tool": -1.0}}, {}, "--roles tool=-1.0"),
    ("echo", {"roles": {"tool": float("nan")}}, {}, "--roles tool=nan"),
    ("echo", {"roles": {}}, {}, "--roles"),
    ("echo", {"filter": "nowhere.at_all"}, {}, "--filter nowhere.at_all"),
    ("echo", {"num_turns_weight": -0.1}, {}, "--num-turns-weight -0.1"),
]


@pytest.mark.parametrize(("name", "knobs", "rest", "match"), REFUSED)
def test_a_config_refuses(name, knobs, rest, match):
    with pytest.raises(ValueError, match=match):
        check(name, knobs, **rest)


def test_what_is_right_passes_without_a_warning():
    assert check("grpo", {"length_penalty": "linear", "num_turns_weight": 0.0}, temperature=0.7) == []
    assert check("grpo", {"loss_aggregation": "prompt"}) == []
    assert check("rae", {}, group_size=1) == []
    assert check("hierarchical_grpo", {}, env=Proposing()) == []
    assert check("opd", {"teacher": SERVED}, group_size=1) == []
    assert check("opsd", {"demo_key": "answer"}) == []
    assert check("opsd", {"demo_key": "key"}) == []  # a field of the task
    assert check("opsd", {}, env=Stream()) == []  # a stream shows only in the run
    assert check("sft", {"sample_from": SERVED}, temperature=0.7) == []
    assert check("echo", {"roles": {"tool": 0.25, "user": 0.05}, "filter": f"{__name__}.keep_all"}) == []


def test_warnings():
    for name in ("grpo", "max_rl", "echo"):
        assert "--group-size 1" in check(name, {}, group_size=1)[0]  # known fault A24
    assert "--num-turns-weight 0.3 has no effect" in check("grpo", {"num_turns_weight": 0.3})[0]
    linear = {"length_penalty": "linear", "subagent_token_weight": 1.0}
    assert "--subagent-token-weight 1 has no effect" in check("grpo", linear)[0]
    assert "--teacher.name tiny" in check("opd", {"teacher": FrozenModel("tiny", SERVED.base_url)})[0]


def test_no_knob_bears_the_name_of_a_run_s():
    taken = {f.name for cls in (Run, Source) for f in dataclasses.fields(cls)}
    for name, algo in ALGORITHMS.items():
        assert not taken & {f.name for f in dataclasses.fields(algo.Config)}, name


def test_the_algorithms_import_no_torch():
    code = "import sys, algos; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# A ninth algorithm


def test_a_new_algorithm_is_one_file_and_one_line(tmp_path, monkeypatch, tiny_path):
    example = textwrap.dedent(algos.base.__doc__.split("This is all of it:")[1])
    imports = "from algos.base import Algorithm\nfrom traces import assign_advantages, trainable_traces\n"
    (tmp_path / "leave_one_out.py").write_text(imports + example)
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("leave_one_out")
    monkeypatch.setitem(ALGORITHMS, "leave_one_out", module.LeaveOneOut)

    flags = "--algo leave_one_out --group-size 3 --batch-size 6 --max-new-tokens 4 --seq-len 64 --name x"
    config, _ = parse([*flags.split(), "--model", str(tiny_path), "--runs-dir", str(tmp_path)])
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    monitor = Monitor(tmp_path / "x", 1)
    rollouts = Rollouts(config, HFEngine(tiny_path), make_renderer("qwen3", tokenizer), monitor)
    branches, _ = asyncio.run(rollouts.collect(1))
    monitor.close()
    assert len(branches) == 6
    for row in [json.loads(line) for line in (tmp_path / "x" / "rollouts.jsonl").read_text().splitlines()]:
        same = [r for r in rows_of(tmp_path) if r["group"] == row["group"] and r["episode"] != row["episode"]]
        assert row["advantage"] == pytest.approx(row["reward"] - np.mean([r["reward"] for r in same]))

    policy = Policy(tiny_path, OptimizerConfig(1e-3), 1)
    (batch,), counts = pack(branches, 64)
    logprobs, _, _ = policy(batch)
    loss, _ = compute_loss(batch, logprobs, counts.denominators(), make_rl_loss("ipo"))
    loss.backward()
    assert 0 < policy.step(1)["optim/grad_norm"] < float("inf") and counts.ce == counts.ref_kl == 0


def rows_of(folder):
    return [json.loads(line) for line in (folder / "x" / "rollouts.jsonl").read_text().splitlines()]
