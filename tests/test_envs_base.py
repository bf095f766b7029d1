"""What an environment can do with its agents: sub-agents, compaction, tools, several players; and how an episode ends."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from rich.console import Console

from config import Config, Source
from engines.base import Completion, Engine, Sampling
from envs import ENVS
from envs.base import Agent, Cut, Env, Player, Tool, read_call, served_players, together, trained_agents, user
from frozen import FrozenModel
from make_tiny import make_tokenizer
from monitor import Monitor
from renderers import make_renderer
from rollouts import EVAL, Group, Rollouts, row_of
from tests.golden_cases import cases, check
from tests.test_golden_math import run_merge
from traces import ROOT, Edge, Task, Trace

RENDERER = make_renderer("qwen3", make_tokenizer(), "qwen3")


class Talker(Engine):
    """Answers each prompt (as text) with what `speak` says; a text that ends with "..." is cut there by its length."""

    def __init__(self, speak, max_context=100_000, renderer=RENDERER):
        super().__init__(max_context)
        self.speak, self.renderer, self.prompts, self.keys = speak, renderer, [], []

    async def generate(self, prompt_ids, sampling):
        self.prompts.append(self.renderer.decode(prompt_ids))
        self.keys.append(sampling.key)
        text = self.speak(self.prompts[-1])
        await asyncio.sleep(0)
        cut, room = text.endswith("..."), min(sampling.max_new_tokens, self.max_context - len(prompt_ids))
        ids = self.renderer.tokenizer.encode(text, add_special_tokens=False)[:room]
        ids += [] if cut else self.renderer.stop_token_ids[:1]
        return Completion(ids, [-0.5] * len(ids), "length" if cut else "stop", self.version)


def asked(prompt):
    """The last message of a prompt."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def agent_of(speak, renderer=RENDERER):
    """An agent of its own, the engine behind it, and its trace."""
    engine, trace = Talker(speak, renderer=renderer), Trace()

    async def sample(prompt_ids, turn, messages, tools):
        return await engine.generate(prompt_ids, Sampling(10_000, key=(turn,)))

    return Agent(trace, renderer, sample), engine, trace


@dataclass
class OneTask(Env):
    """The same task over and over."""

    def tasks(self, split):
        return [Task("t", [user("go")])]


def play(env, speak, tmp_path, monkeypatch, served=None, **knobs):
    """One evaluated episode of an environment, and what the engine was asked."""
    monkeypatch.setitem(ENVS, "played", type(env))
    max_context = knobs.pop("max_context", 10_000)
    config = Config(sources=[Source(env=env)], **{"max_new_tokens": 50} | knobs).resolved()
    monitor = Monitor(tmp_path / "run", 1, Console(quiet=True))
    rollouts = Rollouts(config, Talker(speak, max_context), RENDERER, monitor, lambda model: served)
    (stage,) = rollouts.stages
    episode = asyncio.run(rollouts._play(Group(0, stage, env.tasks("train")[0]), 0, 0, EVAL))
    return episode, rollouts.engine


# Sub-agents


def test_a_helper_has_a_conversation_of_its_own_in_the_same_trace():
    agent, engine, trace = agent_of(lambda prompt: f"<{asked(prompt)}>")

    async def episode():
        await agent.say(user("a"))
        helper = agent.subagent()
        await helper.say(user("b"))
        await helper.say(user("c"))
        helper.returns_to(agent)
        return await agent.say(user("d"))

    reply = asyncio.run(episode())
    assert reply["content"] == "<d>" and trace.num_turns == 4
    assert trace.edges == [Edge(ROOT, "subagent_call-1", "subagent_call"), Edge("subagent_call-1", ROOT, "return")]
    assert [(branch.call, len(branch.turns)) for branch in trace.branches] == [(ROOT, 2), ("subagent_call-1", 2)]
    assert [m["content"] for m in trace.messages] == ["a", "<a>", "d", "<d>"]
    assert [m["content"] for m in trace.calls["subagent_call-1"]] == ["b", "<b>", "c", "<c>"]
    assert "<a>" not in engine.prompts[2] and "<c>" not in engine.prompts[3]
    assert engine.keys == [(0,), (1,), (2,), (3,)], "no two requests have the same randomness"


def test_helpers_of_helpers_and_other_edges():
    agent, _, trace = agent_of(lambda prompt: "x")

    async def episode():
        helper = agent.subagent()
        deeper = helper.subagent()
        await together(helper.say(user("a")), deeper.say(user("a")), agent.say(user("a")))
        await agent.subagent("continuation").say(user("a"))

    asyncio.run(episode())
    calls = ["subagent_call-1", "subagent_call-2", "continuation-3"]
    assert [edge[:2] for edge in trace.edges] == [(ROOT, calls[0]), (calls[0], calls[1]), (ROOT, calls[2])]
    assert sorted(branch.call for branch in trace.branches) == sorted([ROOT, *calls]), (
        "one prompt, and yet four branches"
    )
    assert [m["content"] for m in trace.messages] == ["a", "x"]


@pytest.mark.parametrize(("file", "doc", "case"), cases("merge"))
def test_the_branches_of_each_call_merge_as_if_it_were_alone(file, doc, case):
    def interleaved(call):
        trace = Trace()
        for step in case["steps"]:
            for other in ("a", "b", ROOT):
                trace.add_turn(step["prompt_ids"], step["completion_ids"], step["completion_logprobs"], call=other)
        alone = Trace(branches=[branch for branch in trace.branches if branch.call == call])
        assert trace.num_sampled == 3 * alone.num_sampled
        return alone

    def run():
        want = run_merge(case)
        for call in ("a", ROOT):
            branches = interleaved(call).training_branches()
            assert [branch.token_ids.tolist() for branch in branches] == [s["token_ids"] for s in want["samples"]]
            assert [branch.sampled.tolist() for branch in branches] == [s["sampled_mask"] for s in want["samples"]]
        return want

    check(doc, case, run, "float32")


def test_where_one_of_several_fails_the_others_are_stopped_first():
    events = []

    async def sleeper():
        try:
            await asyncio.sleep(1e6)
        finally:
            events.append("stopped")

    async def fails():
        await asyncio.sleep(0)
        raise Cut("max_turns")

    async def main():
        with pytest.raises(Cut):
            await together(sleeper(), fails(), sleeper())
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(main()) == set() and events == ["stopped", "stopped"]


# Compaction


def test_compaction_goes_on_from_the_summary():
    agent, engine, trace = agent_of(lambda prompt: "all is well" if asked(prompt) == "sum up" else "fine")

    async def episode():
        await agent.say(user("first"))
        await agent.say(user("second"))
        summary = await agent.compact(user("unsaid"), user("sum up"))
        assert summary["content"] == "all is well"
        return await agent.say(user("third"))

    asyncio.run(episode())
    assert trace.edges == [Edge(ROOT, "compaction-1", "compaction")]
    assert [(branch.call, len(branch.turns)) for branch in trace.branches] == [(ROOT, 3), ("compaction-1", 1)]
    assert [m["content"] for m in trace.calls["compaction-1"]] == ["first", "all is well", "third", "fine"]
    assert [m["content"] for m in agent.messages] == ["first", "all is well", "third", "fine"]
    assert "unsaid" in engine.prompts[2] and "second" not in engine.prompts[3] and "unsaid" not in engine.prompts[3]
    assert not trace.branches[1].sampled[: trace.branches[1].turns[0].prompt_len].any(), "the summary trains once"


def test_an_empty_summary_leaves_the_conversation_as_it_is():
    agent, engine, trace = agent_of(lambda prompt: " " if asked(prompt) == "sum up" else "fine")

    async def episode():
        await agent.say(user("first"))
        await agent.compact(user("sum up"))
        await agent.say(user("second"))

    asyncio.run(episode())
    assert trace.edges == [] and len(trace.branches) == 1 and "first" in engine.prompts[2]


def test_compaction_twice_with_tools_in_the_prompt():
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    agent, engine, trace = agent_of(lambda prompt: "x")

    async def episode():
        for turn in range(2):
            await agent.say(*([user("first")] if turn == 0 else []), tools=tools)
            await agent.compact(user("sum up"), keep=1, tools=tools)

    asyncio.run(episode())
    assert [edge[:2] for edge in trace.edges] == [(ROOT, "compaction-1"), ("compaction-1", "compaction-2")]
    assert all('"look"' in prompt for prompt in engine.prompts)


# Tools


def call_of(name, arguments, number=0):
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_slow_tools_of_one_reply_run_at_once_and_answer_in_order():
    agent, _, trace = agent_of(lambda prompt: "x")
    meeting = asyncio.Barrier(2)

    async def meet(name: str) -> str:
        await asyncio.wait_for(meeting.wait(), 1)
        if name == "b":
            raise ValueError("b is late")
        return name

    def plain(name: str) -> str:
        return name.upper()

    schema = {"name": {"type": "string"}}
    tools = Tool(meet, "", schema), Tool(plain, "", schema)
    calls = [call_of("meet", {"name": "a"}, 1), call_of("plain", {"name": "c"}, 2), call_of("meet", {"name": "b"}, 3)]
    answers = asyncio.run(agent.answer_calls({"tool_calls": calls}, *tools))
    assert [answer["content"] for answer in answers] == ["a", "C", "error: b is late"]
    assert [answer["tool_call_id"] for answer in answers] == ["call_1", "call_2", "call_3"]
    assert trace.metrics == {"calls": 3, "malformed_calls": 1}
    assert asyncio.run(agent.answer_calls({"content": "nothing"}, *tools)) == []


@pytest.mark.parametrize(
    ("parameter", "value", "right"),
    [("integer", 3, True), ("integer", True, False), ("integer", "3", False), ("integer", 3.0, False),
     ("number", 3.5, True), ("number", False, False), ("string", "", True), ("string", None, False),
     ("boolean", False, True), ("boolean", 0, False), ("array", [], True), ("object", {}, True), ("object", [], False),
     ("", object, True)],
)  # fmt: skip
def test_arguments_must_be_of_their_type(parameter, value, right):
    tool = Tool(print, "", {"x": {"type": parameter}})
    call = call_of("print", {"x": value, "more": 1})
    if right:
        assert read_call(call, {"print": tool}) == (tool, {"x": value})
    else:
        with pytest.raises(ValueError, match=f"print needs the argument x, of type {parameter}"):
            read_call(call, {"print": tool})


BROKEN = {
    "broken JSON": "<tool_call>{bad</tool_call>",
    "arguments are text": '<tool_call>{"name":"x","arguments":"[1]"}</tool_call>',
    "not closed": '<tool_call>{"name":"x","arguments":{"a":1}}',
    "empty": "<tool_call></tool_call>",
    "unknown": '<tool_call>{"name":"y","arguments":{"a":1}}</tool_call>',
    "too deep": '<tool_call>{"name":"x","arguments":{"a":' + "[" * 120 + "]" * 120 + "}}</tool_call>",
    "two": "<tool_call>{bad</tool_call>\n<tool_call>[]</tool_call>",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_call_is_answered_counted_and_its_tokens_kept(kind):
    """A11"""
    agent, engine, trace = agent_of(lambda prompt: BROKEN[kind] if "<tool_response>" not in prompt else "I see")

    def x(a: int) -> str:
        raise AssertionError("it was called")

    tool = Tool(x, "", {"a": {"type": "integer"}})

    async def episode():
        reply = await agent.say(user("go"))
        answers = await agent.answer_calls(reply, tool)
        return await agent.say(*answers), answers

    reply, answers = asyncio.run(episode())
    expected = 2 if kind == "two" else 1
    assert reply["content"] == "I see" and trace.metrics == {"calls": expected, "malformed_calls": expected}
    assert all(answer["content"].startswith("error: ") for answer in answers)
    (branch,) = trace.branches
    assert RENDERER.decode(branch.token_ids[branch.sampled]) == f"{BROKEN[kind]}<|im_end|>I see<|im_end|>"
    assert "error: " in engine.prompts[1]


def test_a_call_inside_reasoning_is_none():
    """A11"""
    agent, _, _ = agent_of(lambda prompt: "<think>\n<tool_call>{}</tool_call>\n</think>\n\nDone")
    reply = asyncio.run(agent.say(user("go")))
    assert "tool_calls" not in reply and reply["content"] == "Done"


# Several agents


@dataclass
class Duel(OneTask):
    """Two agents say a word each; a third says nothing."""

    agents: ClassVar = ("red", "blue", "judge")
    blue: Player = field(default_factory=Player)
    scripted: bool = False

    def player(self, agent):
        script = lambda messages, rng: f"{agent} {len(messages)} {rng.randrange(10**6)}"  # noqa: E731
        return script if agent == "judge" or (self.scripted and agent == "blue") else super().player(agent)

    async def play(self, task, red, blue, judge):
        replies = await together(red.say(*task.prompt), blue.say(*task.prompt))
        red.trace.reward, blue.trace.reward = 1.0, 0.0
        await judge.say(*replies)


def test_each_agent_leaves_a_trace_of_its_own(tmp_path, monkeypatch):
    env = Duel()
    episode, engine = play(env, lambda prompt: "word", tmp_path, monkeypatch)
    red, blue, judge = episode.traces
    assert trained_agents(env) == ["red", "blue"] and served_players(env) == []
    assert (red.reward, blue.reward, judge.reward) == (1.0, 0.0, None) and episode.error is None
    assert red.usable and blue.usable and not judge.trainable and judge.branches == []
    assert judge.messages[-1]["content"].startswith("judge 2 ") and len(set(engine.keys)) == 2


def test_a_served_player_is_never_trained_and_never_ages(tmp_path, monkeypatch):
    model, served = FrozenModel("them", "http://localhost:1/v1"), Talker(lambda prompt: "theirs")
    env = Duel(blue=Player(model))
    assert served_players(env) == [("env.blue.model", model)] and trained_agents(env) == ["red"]
    episode, engine = play(env, lambda prompt: "ours", tmp_path, monkeypatch, served)
    red, blue, _ = episode.traces
    assert len(engine.prompts) == len(served.prompts) == 1 and red.usable and not blue.trainable
    assert blue.branches[0].version == -1 and blue.messages[-1]["content"] == "theirs"


def test_a_scripted_agent_depends_on_the_episode_alone(tmp_path, monkeypatch):
    said = [play(Duel(scripted=True), lambda prompt: "x", tmp_path, monkeypatch)[0] for _ in range(2)]
    blue, judge = said[0].traces[1:]
    assert [trace.messages for trace in said[0].traces] == [trace.messages for trace in said[1].traces]
    assert blue.messages[-1]["content"].split()[2] != judge.messages[-1]["content"].split()[2], "a generator for each"
    assert blue.num_sampled == 0


# How an episode ends


@dataclass
class Talk(OneTask):
    """So many turns, with a reward set after one of them; `caught`: go on after a limit."""

    turns: int = 1
    reward_after: int = 1
    caught: bool = False
    helper: bool = False

    async def play(self, task, agent):
        try:
            for turn in range(1, self.turns + 1):
                if self.helper:
                    await agent.subagent().say(user("help"))
                await agent.say(*task.prompt)
                if turn == self.reward_after:
                    agent.trace.reward = 0.5
        except Cut as cut:
            if not self.caught:
                raise
            agent.trace.reward = 0.25 if str(cut) == "max_turns" else 0.125


@pytest.mark.parametrize(
    ("env", "knobs", "said", "reason", "reward"),
    [
        (Talk(), {}, "fine", "done", 0.5),
        (Talk(), {"max_new_tokens": 5}, "a long one...", "max_new_tokens", 0.5),
        (Talk(), {"max_context": 40}, "a reply that ends with the context...", "context", 0.5),
        (Talk(turns=9), {"max_turns": 3}, "fine", "max_turns", 0.5),
        (Talk(turns=9, reward_after=8), {"max_turns": 3}, "fine", "max_turns", 0.0),
        (Talk(turns=9, reward_after=8, caught=True), {"max_turns": 3}, "fine", "done", 0.25),
        (Talk(turns=99), {"max_context": 200}, "fine", "context", 0.5),
        (Talk(turns=99, reward_after=98, caught=True), {"max_context": 200}, "fine", "done", 0.125),
        (Talk(turns=9, helper=True), {"max_turns": 3}, "fine", "max_turns", 0.5),
    ],
)
def test_stop_reasons(env, knobs, said, reason, reward, tmp_path, monkeypatch):
    episode, engine = play(env, lambda prompt: said, tmp_path, monkeypatch, **knobs)
    assert (episode.stop_reason, episode.error, episode.traces[0].reward) == (reason, None, reward)
    assert len(engine.prompts) <= knobs.get("max_turns", 99)


@pytest.mark.parametrize(("cut", "reason"), [("help", "done"), ("go", "max_new_tokens")])
def test_it_is_the_last_reply_that_tells_whether_an_episode_was_cut(cut, reason, tmp_path, monkeypatch):
    """A helper that was cut is no end: the main agent went on, though the helper's branch is the younger one."""

    def speak(prompt):
        return "on and on and on..." if asked(prompt) == cut else "fine"

    episode, _ = play(Talk(helper=True), speak, tmp_path, monkeypatch, max_new_tokens=10)
    assert episode.stop_reason == reason and episode.traces[0].truncated


def test_sub_agents_are_written_down(tmp_path, monkeypatch):
    episode, _ = play(Talk(helper=True), lambda prompt: "fine", tmp_path, monkeypatch)
    row = json.loads(json.dumps(row_of(1, Group(0, None, episode.task), episode, episode.traces[0])))
    assert row["edges"] == [{"src": "root", "dst": "subagent_call-1", "type": "subagent_call"}]
    assert row["calls"]["subagent_call-1"][-1] == {"role": "assistant", "content": "fine"}
