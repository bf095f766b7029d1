"""From tasks to a batch: groups, credit, filters, empty rounds, errors, and the token record of several turns."""

import asyncio
import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from rich.console import Console

from algos.grpo import GRPOConfig
from config import Config, Source
from engines.base import EPISODE, Completion, Engine
from engines.hf import HFEngine
from envs import ENVS
from envs.base import Env, user
from make_tiny import make_tokenizer
from monitor import Monitor
from renderers import make_renderer
from renderers.base import Renderer
from rollouts import Rollouts, RunStopped, prune
from traces import Task


class Fake(Engine):
    """Answers with the next scripted completions (ids), or with one letter; remembers what it was asked."""

    def __init__(self, script=()):
        super().__init__(max_context=10_000)
        self.script, self.calls = list(script), []

    async def generate(self, prompt_ids, sampling):
        self.calls.append((list(prompt_ids), sampling))
        token_ids = self.script.pop(0) if self.script else [ord("x"), sampling.stop_token_ids[0]]
        return Completion(token_ids, [-0.5] * len(token_ids), "stop", self.version)


@dataclass
class EchoEnv(Env):
    """Rewards by rollout: a number, None, or an exception to raise; a float in `naps` sleeps first."""

    rewards: list = field(default_factory=lambda: [1.0, 0.0])
    naps: list = field(default_factory=list)
    turns: int = 1
    played: int = 0

    def tasks(self, split):
        return [Task(f"{split}-{i}", [user(f"task {i}")]) for i in range(100)]

    async def play(self, task, agent):
        reward = self.rewards[self.played % len(self.rewards)]
        nap = self.naps[self.played % len(self.naps)] if self.naps else 0
        self.played += 1
        for turn in range(self.turns):
            await agent.say(*task.prompt if turn == 0 else [user("again")])
        await asyncio.sleep(nap)
        if isinstance(reward, Exception):
            raise reward
        agent.trace.reward = reward


@dataclass
class Waits(EchoEnv):
    """Says what the engine knows of its episode while it waits for something that is no model."""

    engine: Engine | None = None

    async def play(self, task, agent):
        await super().play(task, agent)
        waiting = [self.engine._outside[EPISODE.get()]]
        with agent.outside():
            waiting.append(self.engine._outside[EPISODE.get()])
        agent.trace.metrics["outside"] = float([*waiting, self.engine._outside[EPISODE.get()]] == [0, 1, 0])


@pytest.fixture
def build(tmp_path, monkeypatch):
    """rollouts over EchoEnv with a fake engine: build(rewards=..., script=..., **config knobs)."""
    monkeypatch.setitem(ENVS, "echo-env", EchoEnv)

    def make(script=(), group_size=2, env=None, **knobs):
        options = {name: knobs.pop(name) for name in ("rewards", "naps", "turns") if name in knobs}
        config = Config(
            **{"batch_size": 4} | knobs, sources=[Source(env=env or EchoEnv(**options), group_size=group_size)]
        ).resolved()
        monitor = Monitor(tmp_path / "run", 10, Console(file=open(tmp_path / "console.txt", "w"), soft_wrap=True))
        return Rollouts(config, Fake(script), make_renderer("qwen3", make_tokenizer(), "qwen3"), monitor)

    make.console = lambda: (tmp_path / "console.txt").read_text()
    make.rows = lambda: [json.loads(line) for line in open(tmp_path / "run" / "rollouts.jsonl")]
    return make


def collect(rollouts, step=1):
    branches, metrics = asyncio.run(rollouts.collect(step))
    rollouts.monitor.console.file.flush()
    return branches, metrics


def advantages(branches):
    return [float(branch.advantages[branch.sampled][0]) for branch in branches]


def test_an_agent_tells_the_engine_that_it_waits_outside(build, monkeypatch):
    monkeypatch.setitem(ENVS, "waits", Waits)
    rollouts = build(env=Waits())
    rollouts.stages[0].env.engine = rollouts.engine
    assert collect(rollouts)[1]["env/waits/outside"] == 1.0


def test_a_batch_in_deal_order(build):
    rollouts = build(rewards=[1.0, 0.0])
    branches, metrics = collect(rollouts)
    assert advantages(branches) == [0.5, -0.5, 0.5, -0.5]
    assert metrics["reward/mean"] == metrics["reward/echo-env/mean"] == 0.5
    assert metrics["off_policy/mean"] == 0 and metrics["rollouts/finished"] == 4
    assert [row["task"] for row in build.rows()] == ["train-0", "train-0", "train-1", "train-1"]
    assert len({sampling.key for _, sampling in rollouts.engine.calls}) == 4


def test_groups_without_a_signal_are_replaced(build):
    """A14, A25: equal rewards give exact zeros, are dropped, counted, and replaced."""
    branches, metrics = collect(build(rewards=[0.1, 0.1, 1.0, 0.0]))
    assert len(branches) == 4 and metrics["rollouts/no_signal"] == 4 and metrics["rollouts/finished"] == 8
    assert metrics["reward/mean"] == pytest.approx(0.3), "the reward is that of everything that was played"


def test_a_reply_may_be_bare_or_as_its_format_writes_it(build, monkeypatch):
    """Qwen3 writes an empty thinking block before an answer; a model that never learned it says the answer alone."""
    rollouts, asked = build(), []

    async def score(token_ids, temperature):
        asked.append(rollouts.renderer.decode(token_ids))
        return np.array([np.nan] + [-0.5] * (len(token_ids) - 1), np.float32)

    monkeypatch.setattr(rollouts.engine, "score", score)
    found = asyncio.run(rollouts._logprob([user("Hi")], "ab"))
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert asked == [prompt + "ab<|im_end|>", prompt + "<think>\n\n</think>\n\nab<|im_end|>"]
    assert found == pytest.approx(np.logaddexp(-0.5 * 3, -0.5 * 9))
    asked.clear()
    rollouts.renderer = make_renderer("qwen3", make_tokenizer(), "qwen3", thinking=False)  # it is in the prompt already
    assert asyncio.run(rollouts._logprob([user("Hi")], "ab")) == pytest.approx(-0.5 * 3) and len(asked) == 1


def test_without_constant_batches_nothing_is_replaced(build):
    branches, metrics = collect(build(rewards=[0.1, 0.1, 1.0, 0.0], constant_batch_size=False))
    assert len(branches) == 2 and metrics["rollouts/no_signal"] == 2


def test_surplus_starts_the_next_batch_and_has_aged(build):
    rollouts = build(rewards=[1.0, 0.0, 0.2], group_size=3)
    first, metrics = collect(rollouts, 1)
    rollouts.engine.version = 1
    second, later = collect(rollouts, 2)
    assert len(first) == len(second) == 4 and metrics["rollouts/waiting"] == 2
    assert metrics["off_policy/mean"] == 0 and later["off_policy/mean"] == 0.5 and later["off_policy/max"] == 1


BAD = [None, float("nan"), float("inf"), ValueError("broken environment"), SystemExit(0), asyncio.CancelledError()]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_rollout_is_left_out_of_its_group(build, bad):
    """A12, A15: no number, or an exception, in one of four: the mean is that of the other three. An exit, or something of its own
    that the environment has cancelled, is one too."""
    branches, metrics = collect(build(rewards=[1.0, bad, 0.0, 0.5], group_size=4, batch_size=3))
    assert advantages(branches) == [0.5, -0.5, 0.5], "and the rollout that equals the mean has no signal"
    assert metrics["rollouts/errored"] == 2 and metrics["rollouts/no_signal"] == 2 and "echo-env" in build.console()


def test_an_error_is_shown_with_its_traceback_once(build):
    """A12"""
    collect(build(rewards=[ValueError("broken"), 1.0, 0.0], group_size=3))
    assert build.console().count("Traceback") == 1 and "in play" in build.console()
    assert any(row["error"] == "ValueError: broken" for row in build.rows())


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(
    "rewards, why",
    [([0.5], "4 without a signal"), ([ValueError("down")], "4 errored; last error: echo-env: ValueError: down")],
)
def test_too_many_empty_rounds_stop_the_run(build, constant, rewards, why):
    """A12: also where every episode of every round fails."""
    rollouts = build(rewards=rewards, constant_batch_size=constant, max_empty_steps=3)
    with pytest.raises(RunStopped, match=r"3 empty rounds in a row \(--max-empty-steps 3\)"):
        for step in range(1, 10):
            assert collect(rollouts, step)[0] == []
    rollouts.monitor.console.file.flush()
    assert build.console().count("empty round") == 3 and why in build.console()


def test_empty_rounds_must_be_in_a_row(build):
    rollouts = build(rewards=[0.5] * 8 + [1.0, 0.0] + [0.5] * 8 + [1.0, 0.0], max_empty_steps=3)
    assert len(collect(rollouts)[0]) == 4


def test_an_episode_that_never_ends_is_an_error(build):
    """A13, for code that awaits: the others go on, and the group is scored without it."""
    branches, metrics = collect(
        build(rewards=[1.0, 0.0, 0.5], naps=[0, 1e6, 0], group_size=3, batch_size=2, rollout_timeout=0.3)
    )
    assert len(branches) == 2 and metrics["rollouts/errored"] == 1 and "--rollout-timeout" in build.rows()[1]["error"]


def test_sampled_ids_are_trained_and_never_encoded_again(build, monkeypatch):
    """A9: ids that a tokenizer would have merged, half of a UTF-8 character, three turns: what was sampled is what trains."""
    stop = make_tokenizer().convert_tokens_to_ids("<|im_end|>")
    script = [
        [0xC3, stop],
        [ord("a"), ord("b"), stop],
        [ord("<"), ord("t"), stop],
        [ord("y"), stop],
        [ord("y"), stop],
        [ord("y"), stop],
    ]
    rollouts = build(script=[list(ids) for ids in script], turns=3, batch_size=2, rewards=[1.0, 0.0])
    encoded = []
    plain = Renderer._encode
    monkeypatch.setattr(Renderer, "_encode", lambda self, text: (encoded.append(text), plain(self, text))[1])
    branches, _ = collect(rollouts)
    assert len(branches) == 2, "three turns of one conversation are one sequence"
    sampled = [branch.token_ids[branch.sampled].tolist() for branch in branches]
    assert sorted(sum(sampled, [])) == sorted(sum(script, [])) and [0xC3, stop] == sampled[0][:2]
    assert encoded and not any("ab" in text or "<t" in text or "yy" in text or "\ufffd" in text for text in encoded)
    for branch in branches:
        first = next(
            prompt for prompt, sampling in rollouts.engine.calls if branch.token_ids[: len(prompt)].tolist() == prompt
        )
        assert branch.token_ids[: len(first)].tolist() == first


def test_evaluation_plays_held_out_tasks_and_trains_nothing(build):
    rollouts = build(rewards=[1.0, ValueError("x"), 0.0, 0.5], eval_samples=4)
    metrics = asyncio.run(rollouts.evaluate(0))
    assert metrics == {"eval/echo-env/mean": 0.5, "eval/echo-env/errored": 1.0}
    assert all(sampling.key[1] == 1 for _, sampling in rollouts.engine.calls) and not rollouts.queue.waiting


def test_pruning_leaves_other_components_alone(build):
    branches, _ = collect(build())
    branch = branches[0]
    branch.advantages = np.where(branch.sampled, 0.0, branch.advantages)
    assert not prune(branch)
    branch.ce_weights = np.zeros(len(branch))
    branch.ce_weights[3] = 0.1
    assert prune(branch) and not branch.rl_weights[branch.sampled].any()


def test_one_that_hangs_before_it_asks_does_not_take_the_others_time(build, tiny_path):
    """A13: the engine waits for every live episode, so the clocks of those that wait for it must stand still."""

    @dataclass
    class HangsFirst(EchoEnv):
        async def play(self, task, agent):
            self.played = number = self.played + 1
            await asyncio.sleep(1e6 if number == 2 else 0)
            await agent.say(*task.prompt)
            agent.trace.reward = float(number % 4 == 0)

    ENVS["hangs-first"] = HangsFirst
    try:
        rollouts = build(env=HangsFirst(), group_size=4, batch_size=2, rollout_timeout=0.5, max_new_tokens=4)
        rollouts.engine = HFEngine(tiny_path)
        _, metrics = collect(rollouts)
    finally:
        del ENVS["hangs-first"]
    assert metrics["rollouts/errored"] == 1 and metrics["rollouts/finished"] >= 4


@pytest.mark.parametrize("how", ["says nothing", "is not trainable"])
def test_rollouts_without_anything_sampled_are_counted_and_stop_the_run(build, monkeypatch, how):
    @dataclass
    class Silent(EchoEnv):
        async def play(self, task, agent):
            if how == "is not trainable":
                await agent.say(*task.prompt)
                agent.trace.trainable = False
            agent.trace.reward = 1.0

    monkeypatch.setitem(ENVS, "silent", Silent)
    rollouts = build(env=Silent(), max_empty_steps=2)
    with pytest.raises(RunStopped, match="4 with nothing sampled"):
        collect(rollouts)


@pytest.mark.parametrize("reward", [np.float32(1), np.bool_(True), True, np.array(1.0)])
def test_a_reward_of_any_numeric_type_is_a_number(build, reward):
    branches, _ = collect(build(rewards=[reward, 0.0]))
    assert advantages(branches) == [0.5, -0.5, 0.5, -0.5] and build.rows()[0]["reward"] == 1.0


def test_a_reward_that_is_no_number_ends_its_episode_alone(build):
    _, metrics = collect(build(rewards=["high", 1.0, 0.0], group_size=3))
    assert metrics["rollouts/errored"] >= 1 and "reward of agent is 'high'" in build.console()


def test_two_sources_of_one_environment_keep_their_numbers_apart(build):
    rollouts = build()
    rollouts.config.sources = [Source(env=EchoEnv(rewards=[r]), algo=GRPOConfig(), group_size=2) for r in (1.0, 0.0)]
    rollouts = Rollouts(rollouts.config, rollouts.engine, rollouts.renderer, rollouts.monitor)
    metrics = asyncio.run(rollouts.evaluate(0))
    assert (metrics["eval/echo-env/mean"], metrics["eval/echo-env-2/mean"]) == (1.0, 0.0)
