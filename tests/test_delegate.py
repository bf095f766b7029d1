"""Delegation: who sees what, branches and edges, what lengths cost, replies that make trouble, and a step of training."""

import asyncio
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from algos.advantage import GroupRelativeConfig, subagent_calls, token_counts
from algos.grpo import GRPOConfig
from config import Config, Source
from engines.base import Completion
from engines.hf import HFEngine
from envs.delegate import SUM_UP, Delegate, asking_lines, read_line
from losses import as_scalars, compute_loss, make_rl_loss, merge
from make_tiny import EOS, text_ids
from monitor import Monitor
from packing import pack
from policy import OptimizerConfig, Policy
from renderers import make_renderer
from rollouts import Rollouts
from tests.conftest import ROOT
from tests.renderer_data import CHATML, byte_tokenizer
from tests.test_envs_base import RENDERER, agent_of, asked, call_of
from traces import ROOT as MAIN
from traces import Edge

TINY = ROOT / "models" / "tiny" / "base"
HELPERS = [f"subagent_call-{n}" for n in (1, 2, 3)]


def task_of(env=None):
    return (env or Delegate()).tasks("train")[0]


def word_of(task):
    return re.search(r'"(\w+)"', task.prompt[0]["content"])[1]


def count(question, word):
    """What an able helper says to a prompt: its list, and a question about a word."""
    return str(len(re.findall(rf"\b{word}\b", question.partition("\n")[0])))


def by_lines(*parts):
    return "\n".join(f"ask {part}: how many?" for part in parts)


def by_tool(*parts):
    calls = [{"name": "ask", "arguments": {"part": part, "question": "how many?"}} for part in parts]
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def play(*replies, env=None, renderer=RENDERER):
    """(trace, engine) of an episode in which the main agent says these (the last one over and over) and helpers count."""
    env, said = env or Delegate(), list(replies)
    task = task_of(env)

    def speak(prompt):
        question = asked(prompt)
        if question.startswith("List "):
            return count(question, word_of(task))
        return said.pop(0) if len(said) > 1 else said[0]

    agent, engine, trace = agent_of(speak, renderer)
    asyncio.run(env.play(task, agent))
    return trace, engine


def answer_of(env=None):
    return str(task_of(env).info["answer"])


def test_tasks_are_right_distinct_and_apart():
    env = Delegate(num_tasks=200)
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert len(train) == len(held_out) == 200 and len({task.key for task in train + held_out}) == 400
    for task in train:
        assert task.info["answer"] == sum(items.split(", ").count(word_of(task)) for items in task.info["parts"])
        assert not any(items in task.prompt[0]["content"] for items in task.info["parts"] if ", " in items)
        assert asking_lines(task.prompt[0]["content"]) == ["ask 2: your question"], (
            "the format stands there to be copied"
        )
    assert [task.key for task in env.tasks("train")] == [task.key for task in train]
    assert all(len(task.info["parts"]) == 5 for task in Delegate(parts=5).tasks("train"))


@pytest.mark.parametrize("ask", [by_lines, by_tool])
@pytest.mark.parametrize("show_tool", [False, True])
def test_helpers_find_what_the_main_agent_adds_up(ask, show_tool):
    trace, engine = play(ask(1, 2, 3), f"It is {answer_of()}.", env=Delegate(show_tool=show_tool))
    assert trace.reward == 1.0 and trace.metrics == {"calls": 3, "malformed_calls": 0}
    assert [(branch.call, len(branch.turns)) for branch in trace.branches] == [(MAIN, 2), *[(h, 1) for h in HELPERS]]
    assert [edge for edge in trace.edges if edge.type == "subagent_call"] == [
        Edge(MAIN, helper, "subagent_call") for helper in HELPERS
    ]
    assert {edge for edge in trace.edges if edge.type == "return"} == {Edge(h, MAIN, "return") for h in HELPERS}
    task = task_of()
    for number, (call, part) in enumerate(zip(HELPERS, task.info["parts"], strict=True), 1):
        assert trace.calls[call][0]["content"] == f"List {number}: {part}\n\nhow many?"
        assert engine.prompts.index(next(p for p in engine.prompts if f"List {number}:" in p)) == number, "all at once"
    answers = [count(f"List: {part}", word_of(task)) for part in task.info["parts"]]
    back = trace.messages[2:-1]
    if ask is by_lines:
        assert back == [
            {"role": "user", "content": "\n\n".join(f"> ask {n}: how many?\n{a}" for n, a in enumerate(answers, 1))}
        ]
    else:
        assert [(message["role"], message["content"]) for message in back] == [("tool", answer) for answer in answers]
    assert ('"name": "ask"' in engine.prompts[0]) == show_tool and not any(
        "List " in p for p in (engine.prompts[0], engine.prompts[-1])
    )


def test_the_same_conversation_through_any_chat_template():
    renderer = make_renderer("default", byte_tokenizer(CHATML), None)
    for show_tool in (False, True):
        trace, _ = play(by_lines(1, 2, 3), answer_of(), env=Delegate(show_tool=show_tool), renderer=renderer)
        assert trace.reward == 1.0 and len(trace.branches) == 4


def test_every_sampled_token_stands_in_one_branch():
    trace, engine = play(by_lines(1, 2), by_lines(3, 3), answer_of())
    sampled = [RENDERER.decode(b.token_ids[b.sampled]) for b in trace.branches]
    assert len(engine.prompts) == 7 and sum(text.count("<|im_end|>") for text in sampled) == 7
    for branch in trace.branches:
        assert sum(turn.completion_len for turn in branch.turns) == branch.sampled.sum()
        assert RENDERER.decode(branch.token_ids[: branch.turns[-1].prompt_len]) in engine.prompts


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_the_length_penalty_tells_helpers_from_the_main_agent(weight):
    trace, _ = play(by_lines(1, 2), answer_of())
    assert subagent_calls(trace.edges) == set(HELPERS[:2])
    main, *helpers = trace.branches
    config = GroupRelativeConfig(length_penalty="linear-subagent", subagent_token_weight=weight)
    # Output is what was sampled. Input of one growing branch is all the rest of it, as each request showed only what was new.
    outputs = main.sampled.sum() + weight * sum(branch.sampled.sum() for branch in helpers)
    inputs = (~main.sampled).sum() + weight * sum((~branch.sampled).sum() for branch in helpers)
    assert token_counts(trace, config) == (outputs, inputs)
    # By hand: "ask 1: how many?" twice with a line end, and the answer, each with its end token; a digit and an end for a helper.
    assert main.sampled.sum() == 16 + 1 + 16 + 1 + len(answer_of()) + 1
    assert all(branch.sampled.sum() == 2 for branch in helpers)
    if weight == 1:  # the prefix that the branches share is then all that "linear" counts otherwise
        common = [int((h.token_ids[:10] == main.token_ids[:10]).cumprod().sum()) for h in helpers]
        assert token_counts(trace, GroupRelativeConfig(length_penalty="linear"))[1] < inputs - sum(common) + 1


def test_compaction_is_the_main_agent_still():
    env = Delegate(compact_after=1, max_turns=3)
    trace, engine = play(by_lines(1, 2, 3), "all counted", answer_of(), env=env)
    assert trace.reward == 1.0 and Edge(MAIN, "compaction-4", "compaction") in trace.edges
    assert (
        asked(engine.prompts[4]) == SUM_UP and "> ask 3:" in engine.prompts[4] and "> ask 3:" not in engine.prompts[5]
    )
    assert [message["content"] for message in trace.calls["compaction-4"]][1:] == ["all counted", answer_of()]
    assert subagent_calls(trace.edges) == set(HELPERS), "what follows the summary is no helper"
    later, _ = play(by_lines(1), "noted", by_lines(2), "noted", answer_of(), env=env)
    assert [edge.src for edge in later.edges if edge.type == "subagent_call"] == [MAIN, "compaction-2"]
    assert [edge for edge in later.edges if edge.type == "return"][1] == Edge(
        "subagent_call-3", "compaction-2", "return"
    )
    silent, _ = play(by_lines(1), "", answer_of(), env=env)
    assert silent.messages[-2] == {"role": "user", "content": "Go on."} and silent.reward == 1.0


# Trouble


@pytest.mark.parametrize(
    "reply",
    ["ask 4: how many?", "ask 0: how many?", "ask -1: x", "ask two: x", "ask : x", "ASK: x", "ask 1.5: x", "ask ²: x",
     "ask " + "9" * 5000 + ": x", by_tool(4), by_tool("2"), by_tool(None), by_tool(True),
     '<tool_call>{"name": "shell", "arguments": {}}</tool_call>', "<tool_call>{bad</tool_call>"],
)  # fmt: skip
def test_what_can_not_be_asked_is_answered_by_an_error(reply):
    trace, _ = play(reply, answer_of())
    assert trace.metrics == {"calls": 1, "malformed_calls": 1} and trace.reward == 1.0
    assert "error: " in trace.messages[2]["content"] and len(trace.branches) == 1 and trace.edges == []


@pytest.mark.parametrize("ask", [by_lines, by_tool])
def test_very_many_questions_start_few_helpers(ask):
    trace, engine = play(ask(*[1] * 50), answer_of())
    assert trace.metrics == {"calls": 50, "malformed_calls": 47} and len(engine.prompts) == 5


def test_endless_delegation_ends():
    trace, engine = play(by_lines(1, 2, 3) + f"\n{answer_of()}", env=Delegate(max_turns=3))
    assert trace.reward == 0.0 and len(engine.prompts) == 3 + 2 * 3, "nobody is asked in the last turn"
    trace, _ = play(answer_of(), env=Delegate(max_turns=1))
    assert trace.reward == 1.0 and trace.metrics == {"calls": 0, "malformed_calls": 0}


def test_a_helper_has_no_helpers():
    """What a helper says is an answer, whatever it looks like."""
    env = Delegate(max_turns=2)

    def speak(prompt):
        return by_lines(1, 2, 3) if asked(prompt).startswith("List ") or "> ask" not in prompt else answer_of()

    agent, engine, trace = agent_of(speak)
    asyncio.run(env.play(task_of(), agent))
    assert len(engine.prompts) == 5 and trace.reward == 1.0 and trace.metrics["calls"] == 3


@given(
    st.text(max_size=80) | st.lists(st.sampled_from(["ask", " ", "1", ":", "\n", "<tool_call>", "{", "²"])).map("".join)
)
@settings(max_examples=40, deadline=None)
def test_no_reply_raises(text):
    trace, _ = play(text, env=Delegate(max_turns=2, compact_after=1))
    assert trace.reward in (0.0, 1.0)
    for line in asking_lines(text):
        json.dumps(read_line(line))


@pytest.mark.parametrize("option", ["parts", "max_items", "max_turns", "num_tasks"])
def test_options_that_make_no_sense(option):
    with pytest.raises(ValueError, match=f"--env.{option.replace('_', '-')} 0: must be at least 1"):
        Delegate(**{option: 0}).check()


# Training


class Scripted(HFEngine):
    """A model that is made to say things: the ids are given, their log-probs are its own."""

    def __init__(self, path, speak, **options):
        super().__init__(path, **options)
        self.speak = speak

    async def generate(self, prompt_ids, sampling):
        ids = [*text_ids(self.speak(RENDERER.decode(prompt_ids), sampling.key)), EOS]
        scores = await self.score([*prompt_ids, *ids])
        return Completion(ids, scores[len(prompt_ids) :].tolist(), "stop", self.version)


def test_a_training_step(tmp_path):
    """Every other rollout is right: what its helpers and its main agent said becomes likelier, all branches of it."""
    env = Delegate(max_items=4, num_tasks=1)
    (task,) = env.tasks("train")

    def speak(prompt, key):
        if asked(prompt).startswith("List "):
            return "one" if key[4] % 2 else "two"
        return str(task.info["answer"] + key[4] % 2) if "> ask" in prompt else by_lines(1, 2, 3)

    algo = GRPOConfig(length_penalty="linear-subagent", subagent_token_weight=1.0)
    config = Config(sources=[Source(env=env, algo=algo, group_size=4)], model="tiny", batch_size=8, seq_len=1024)
    config = config.resolved()
    config.check()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    policy = Policy(TINY, OptimizerConfig.of(config), 1)
    engine, monitor = Scripted(TINY, speak, max_context=1024), Monitor(tmp_path, 1, Console(quiet=True))
    rollouts = Rollouts(config, engine, RENDERER, monitor)
    branches, metrics = asyncio.run(rollouts.collect(1))
    assert metrics["rollouts/errored"] == 0 and metrics["reward/mean"] == 0.5 and metrics["env/delegate/calls"] == 3
    assert len(branches) == 8 * 4 and {branch.call for branch in branches} == {MAIN, *HELPERS}
    batches, counts = pack(branches, config.seq_len, config.micro_batch_tokens)
    assert counts.rl == sum(branch.sampled.sum() for branch in branches)
    summaries = []
    for batch in batches:
        logprobs, _, _ = policy(batch)
        loss, summary = compute_loss(batch, logprobs, counts.denominators(), make_rl_loss("ipo"))
        loss.backward()
        summaries.append(summary)
    scalars = as_scalars(merge(summaries)) | policy.step(1)
    assert scalars["mismatch_kl/mean"] < 1e-6 and np.isfinite(list(scalars.values())).all()
    before = [branch.logprobs[branch.sampled].mean() for branch in branches]
    engine.load_weights(policy.weights(), version=1)

    async def score_all():
        with engine.playing("x"):
            return [await engine.score(branch.token_ids) for branch in branches]

    after = [scores[b.sampled].mean() for b, scores in zip(branches, asyncio.run(score_all()), strict=True)]
    signs = [branch.advantages[branch.sampled][0] for branch in branches]
    gains = np.array(after) - np.array(before)
    words = np.array([branch.call != MAIN for branch in branches])
    good = np.array(signs) > 0
    assert gains[words & good].mean() > gains[words & ~good].mean(), (
        "what helpers said in good episodes gains on the rest"
    )
    torch.set_num_threads(threads)
    monitor.close()


def test_a_call_of_a_tool_and_a_line_are_the_same_call():
    assert read_line("ask 2: how many?") == call_of("ask", {"part": 2, "question": "how many?"}) | {"id": ""}


def test_a_model_that_was_taught_how_to_ask_need_not_be_told():
    (told, short) = (task_of(Delegate(explain=explain)) for explain in (True, False))
    assert told.key == short.key and told.info == short.info
    assert told.prompt[0]["content"].startswith(short.prompt[0]["content"] + "\nEach list has a helper")
    assert not asking_lines(short.prompt[0]["content"])
