"""Kuhn poker: its rules and its exact evaluation against a payoff matrix over all pure strategies, replies that are no moves, and
who plays a seat and is trained."""

import asyncio
import itertools
import json
import math
import random
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoTokenizer

from command_line import parse
from engines.base import Completion
from engines.hf import HFEngine
from envs.base import Agent, Cut, ScriptedAgent
from envs.kuhn_poker import DEALS, INFORMATION_SETS, MOVES, KuhnPoker, best_response, nash, nash_conv, payoff, value
from frozen import FrozenModel
from make_tiny import EOS, STRATEGY, make_tokenizer, text_ids
from monitor import Monitor
from renderers import make_renderer
from rollouts import Rollouts
from tests.conftest import ROOT
from traces import Trace

RENDERER = make_renderer("qwen3", make_tokenizer(), "qwen3")
SERVED = ["--env.player1.model.name", "gpt", "--env.player1.model.base-url", "http://localhost:8001/v1"]


def play(deal, replies0, replies1, **options):
    """The two traces of a game in which the players say these texts, and the prompts that they saw."""
    env, prompts = KuhnPoker(**options), []
    traces = [Trace("player0"), Trace("player1")]

    def agent(trace, replies):
        async def sample(prompt_ids, turn, messages, tools):
            prompts.append(RENDERER.decode(prompt_ids))
            ids = [*text_ids(replies[turn]), EOS]
            return Completion(ids, [-1.0] * len(ids), "stop", 0)

        return Agent(trace, RENDERER, sample)

    task = next(task for task in env.tasks("train") if task.info["cards"] == deal)
    asyncio.run(env.play(task, *map(agent, traces, (replies0, replies1))))
    return traces, prompts


# The reference: six yes or no for each player (a bet with J, Q, K; a call with J, Q, K), and what every pair of such plans earns.


def chips(high0, bet0, call0, bet1, call1):
    """What player0 wins, by who puts in what; high0: it holds the higher card."""
    if bet0:
        return (2 if high0 else -2) if call1 else 1
    if bet1:
        return (2 if high0 else -2) if call0 else -1
    return 1 if high0 else -1


PLANS = list(itertools.product((False, True), repeat=6))
MATRIX = np.array(
    [
        [np.mean([chips(a > b, x[a], x[3 + a], y[b], y[3 + b]) for a in range(3) for b in range(3) if a != b]) for y in PLANS]
        for x in PLANS
    ]
)  # fmt: skip


def mixtures(strategy):
    """How likely each plan is, [64] for each player."""
    for first, then in (((), ("check", "bet")), (("check",), ("bet",))):
        p = np.array([strategy[card, history] for history in (first, then) for card in "JQK"])
        yield np.prod(np.where(np.array(PLANS), p, 1 - p), axis=1)


def by_matrix(strategy):
    """(NashConv, value)"""
    x, y = mixtures(strategy)
    return (MATRIX @ y).max() - (x @ MATRIX).min(), x @ MATRIX @ y


STRATEGIES = st.lists(st.floats(0, 1), min_size=12, max_size=12).map(
    lambda p: dict(zip(INFORMATION_SETS, p, strict=True))
)


@given(STRATEGIES)
@settings(max_examples=100, deadline=None)
def test_evaluation_is_that_of_the_payoff_matrix(strategy):
    expected, worth = by_matrix(strategy)
    assert nash_conv(strategy) == pytest.approx(expected, abs=1e-12) and value(strategy) == pytest.approx(
        worth, abs=1e-12
    )
    x, y = mixtures(strategy)
    assert best_response(strategy, 0) == pytest.approx((MATRIX @ y).max(), abs=1e-12)
    assert best_response(strategy, 1) == pytest.approx(-(x @ MATRIX).min(), abs=1e-12)
    assert expected > -1e-12


def test_every_pair_of_pure_strategies():
    for x, y in itertools.product(PLANS[::7], PLANS[::5]):
        chosen = dict(zip(INFORMATION_SETS, [*x[:3], *y, *x[3:]], strict=True))
        strategy = {at: float(active) for at, active in chosen.items()}
        assert value(strategy) == pytest.approx(MATRIX[PLANS.index(x), PLANS.index(y)], abs=1e-12)


@pytest.mark.parametrize("alpha", [0, 0.01, 0.1, 0.2, 0.3, 1 / 3])
def test_the_family_of_equilibria(alpha):
    strategy = nash(alpha)
    assert nash_conv(strategy) == pytest.approx(0, abs=1e-12) and value(strategy) == pytest.approx(-1 / 18)
    assert by_matrix(strategy) == pytest.approx((0, -1 / 18))


def test_beside_the_family():
    assert nash_conv(nash(0.34)) > 0.001
    for at, p in nash(0.2).items():
        if 0 < p < 1:
            assert nash_conv(nash(0.2) | {at: p + 0.05}) > 0.005 or at == ("K", ())  # player0's king may slow down


@pytest.mark.parametrize(("chance", "expected"), [(0.5, 11 / 12), (1.0, 2 / 3), (0.0, 2.0)])
def test_known_strategies(chance, expected):
    """Either move alike; all chips, against which both win 1/3 by giving up the jack; none, against which every bet wins 1."""
    strategy = dict.fromkeys(INFORMATION_SETS, chance)
    assert nash_conv(strategy) == pytest.approx(expected) and by_matrix(strategy)[0] == pytest.approx(expected)


def test_every_ending():
    games = [h for n in (2, 3) for h in itertools.product(("check", "bet", "fold", "call"), repeat=n)]
    ends = [h for h in games if h not in MOVES and all(h[i] in MOVES.get(h[:i], ()) for i in range(len(h)))]
    assert len(ends) == 5
    for deal, history in itertools.product(DEALS, ends):
        traces, _ = play(deal, history[::2], history[1::2])
        high0 = "JQK".index(deal[0]) > "JQK".index(deal[1])
        both = history[-2:] == ("bet", "call")
        expected = chips(high0, history[0] == "bet", both, history[-2] == "bet", both)
        assert (
            [trace.reward for trace in traces]
            == [expected, -expected]
            == [payoff(deal, history), -payoff(deal, history)]
        )
        assert all(trace.metrics == {"illegal": 0.0} and len(trace.branches) == 1 for trace in traces)


def test_what_the_players_read():
    _, prompts = play("KQ", ["check", "call"], ["bet"])
    ask = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format
    first = ask("K: check/bet")
    assert prompts == [first, ask("Q check: check/bet"), first + "check<|im_end|>\n" + ask("bet: fold/call")]
    assert "K" not in prompts[1] and "Q" not in prompts[2], "nobody sees the other's card"
    _, with_rules = play("KQ", ["check", "call"], ["bet"], show_rules=True)
    assert all(len(re.findall("Kuhn poker", prompt)) == 1 for prompt in with_rules)
    for (card, history), said in zip([("K", ()), ("Q", ("check",)), ("K", ("check", "bet"))], prompts, strict=True):
        assert (
            RENDERER.decode(RENDERER.render_ids(KuhnPoker().conversation(card, history), add_generation_prompt=True))
            == said
        )
    assert len({json.dumps(KuhnPoker().conversation(*at)) for at in INFORMATION_SETS}) == 12


STRANGE = ["", "Bet", "BET", "bet.", "check bet", "bet/check", "check\nbet", "fold", "call", "I bet", "b\u0435t", "ｂet", "bet\x00",
           "🙂", "bet" * 300, "<think>bet</think>", "<tool_call>bet</tool_call>", "bet\ufffd", "0"]  # fmt: skip


@pytest.mark.parametrize("reply", STRANGE)
def test_what_is_no_move_loses_two(reply):
    for deal in ("KQ", "JQ"):
        traces, _ = play(deal, [reply], [])
        assert [trace.reward for trace in traces] == [-2, 2]
        traces, _ = play(deal, ["check"], [reply])
        assert [trace.reward for trace in traces] == [2, -2]
        assert all(trace.metrics == {"illegal": 1.0} for trace in traces)
    reply = "check" if reply in ("fold", "call") else reply
    traces, _ = play("KQ", ["check", reply], ["bet"])
    assert [trace.reward for trace in traces] == [-2, 2]


@pytest.mark.parametrize("limit", ["max_turns", "context"])
def test_who_is_cut_off_by_a_limit_loses_as_by_an_illegal_move(limit):
    """Else a player who is to fold (-1) does better to have filled its context (0)."""
    traces = [Trace("player0"), Trace("player1")]

    def agent(trace, move):
        async def sample(prompt_ids, turn, messages, tools):
            if turn:
                raise Cut(limit)
            ids = [*text_ids(move), EOS]
            return Completion(ids, [-1.0] * len(ids), "stop", 0)

        return Agent(trace, RENDERER, sample)

    env = KuhnPoker()
    with pytest.raises(Cut, match=limit):
        asyncio.run(env.play(env.tasks("train")[0], *map(agent, traces, ("check", "bet"))))
    assert [(trace.reward, trace.metrics) for trace in traces] == [(-2, {"illegal": 1}), (2, {"illegal": 1})]


@given(st.text(max_size=20), st.text(max_size=20))
@settings(max_examples=30, deadline=None)
def test_no_reply_raises(one, other):
    traces, _ = play("KQ", [one, other], [other])
    assert traces[0].reward == -traces[1].reward and abs(traces[0].reward) in (1, 2)


def test_white_space_does_not_count():
    assert play("KQ", [" bet\n"], ["call "])[0][0].reward == 2


def test_tasks_are_the_six_deals():
    env = KuhnPoker()
    train = env.tasks("train")
    assert sorted(task.info["cards"] for task in train) == ["JK", "JQ", "KJ", "KQ", "QJ", "QK"]
    held_out = list(itertools.islice(env.tasks("eval"), 600))
    assert set(Counter(task.info["cards"] for task in held_out).values()) == {100}
    assert len({task.key for task in train + held_out}) == 606


# Evaluation by log-probs


def evaluated(strategy, legal=1.0, env=None):
    """What the environment makes of a policy that plays a strategy and says something legal with this probability."""
    env = env or KuhnPoker()
    at_conversation = {json.dumps(env.conversation(*at)): at for at in INFORMATION_SETS}

    async def logprob(messages, text):
        at = at_conversation[json.dumps(messages)]
        p = [1 - strategy[at], strategy[at]][MOVES[at[1]].index(text)] * legal
        return math.log(p) if p else -1000.0

    return asyncio.run(env.evaluate(logprob))


@pytest.mark.parametrize("options", [{}, {"show_rules": True}])
def test_evaluate_asks_for_the_strategy(options):
    strategy = {at: random.Random(0).random() for at in INFORMATION_SETS} | {("K", ()): 1.0, ("J", ("bet",)): 0.0}
    got = evaluated(strategy, legal=0.25, env=KuhnPoker(**options))
    expected, worth = by_matrix(strategy)
    assert got == pytest.approx({"nash_conv": expected, "value": worth, "legal": 0.25})
    assert evaluated(nash(0.1))["nash_conv"] == pytest.approx(0, abs=1e-9)


def test_a_policy_that_says_nothing_legal_still_has_a_strategy():
    async def logprob(messages, text):
        return -2000.0 - len(text)

    got = asyncio.run(KuhnPoker().evaluate(logprob))
    assert got["legal"] == 0 and all(map(math.isfinite, got.values()))


# Seats


def test_a_script_plays_its_strategy():
    env, asked = KuhnPoker(), Counter()
    env.player1.script = "nash"
    script, rng = env.player("player1"), random.Random(0)
    for at in INFORMATION_SETS:
        said = Counter(script(env.conversation(*at), rng) for _ in range(1000))
        assert set(said) <= set(MOVES[at[1]])
        assert said[MOVES[at[1]][1]] / 1000 == pytest.approx(nash()[at], abs=0.05)
        asked += said
    assert env.player("player0") is None and asked.total() == 12_000


def test_two_scripts_play_whole_games():
    env = KuhnPoker()
    env.player0.script = env.player1.script = "nash"
    total, games = 0, 3000
    for i, task in enumerate(itertools.islice(env.tasks("eval"), games)):
        traces = [Trace("player0"), Trace("player1")]
        agents = [
            ScriptedAgent(trace, env.player(trace.agent), random.Random(2 * i + k)) for k, trace in enumerate(traces)
        ]
        asyncio.run(env.play(task, *agents))
        total += traces[0].reward
        assert traces[0].reward == -traces[1].reward and not traces[0].branches
    assert total / games == pytest.approx(-1 / 18, abs=0.08)


def test_seats_on_the_command_line(capsys):
    config, _ = parse(["--algo", "rae", "--env", "kuhn-poker", *SERVED])
    env = config.sources[0].env
    assert env.player1.model == FrozenModel("gpt", "http://localhost:8001/v1") == env.player("player1")
    assert env.player("player0") is None and [flag for flag, _, _ in config.frozen_models()] == ["env.player1.model"]
    config, _ = parse(["--algo", "rae", "--env", "kuhn-poker", "--env.player0.script", "uniform", "--env.show-rules"])
    assert callable(config.sources[0].env.player("player0")) and config.sources[0].env.show_rules
    refused = {
        (*SERVED, "--env.player1.script", "nash"): "--env.player1.script nash: --env.player1.model",
        ("--env.player0.script", "nash", "--env.player1.script", "nash"): "--env kuhn-poker: the policy plays no agent",
        ("--env.player0.script", "expert"): "--env.player0.script",
        tuple(SERVED[:2]): "needs --env.player1.model.base-url",
    }
    for args, message in refused.items():
        with pytest.raises(SystemExit):
            parse(["--algo", "rae", "--env", "kuhn-poker", *args])
        assert message in " ".join(capsys.readouterr().err.split())


# A run


@pytest.fixture
def collect(tmp_path):
    """collect(*args) -> (rollouts over the shipped model, branches of a batch, its metrics, rows of rollouts.jsonl)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(*args, connect=None):
        config, _ = parse(["--algo", "rae", "--env", "kuhn-poker", "--max-new-tokens", "8", *args])
        path = ROOT / "models" / "tiny" / "kuhn-poker"
        renderer = make_renderer("auto", AutoTokenizer.from_pretrained(path), "qwen3")
        monitor = Monitor(tmp_path, 1, Console(quiet=True))
        rollouts = Rollouts(config, HFEngine(path, max_context=config.seq_len), renderer, monitor, connect)
        branches, metrics = asyncio.run(rollouts.collect(1))
        monitor.close()
        return rollouts, branches, metrics, [json.loads(line) for line in open(tmp_path / "rollouts.jsonl")]

    yield run
    torch.set_num_threads(threads)


def test_both_players_are_trained_each_against_its_own_baseline(collect):
    rollouts, branches, metrics, rows = collect("--batch-size", "96", "--decay", "0.9")
    # Who was to answer an illegal first move has said nothing, and is not trained.
    rows = [row for row in rows if row["branches"]]
    assert len(branches) == 96 <= len(rows) and metrics["rollouts/errored"] == 0
    assert metrics["reward/kuhn-poker/player0"] == -metrics["reward/kuhn-poker/player1"]
    assert abs(metrics["reward/mean"]) < 0.1 and metrics["env/kuhn-poker/illegal"] < 0.1
    baselines = {"player0": 0.0, "player1": 0.0}
    for row in rows:
        agent = row["agent"]
        assert row["advantage"] == pytest.approx(row["reward"] - baselines[agent])
        baselines[agent] = 0.9 * baselines[agent] + 0.1 * row["reward"]
    assert rollouts.stages[0].algorithm.baselines == pytest.approx(baselines)


@pytest.mark.parametrize("pinned", ["player0", "player1"])
def test_only_the_policy_is_trained(collect, pinned):
    rollouts, branches, metrics, rows = collect("--batch-size", "48", f"--env.{pinned}.script", "nash")
    assert len(branches) == 48 and len(rows) == 96
    assert {row["agent"] for row in rows if row["advantage"] is not None} == {"player0", "player1"} - {pinned}
    assert set(rollouts.stages[0].algorithm.baselines) == {"player0", "player1"} - {pinned}
    assert all(not row["branches"] and row["messages"] for row in rows if row["agent"] == pinned and row["messages"])
    assert metrics[f"reward/kuhn-poker/{pinned}"] == -metrics["reward/mean"]


def test_a_served_player(collect):
    """An engine in this process stands in for the server."""
    served = HFEngine(ROOT / "models" / "tiny" / "kuhn-poker", max_context=1024)
    _, branches, _, rows = collect("--batch-size", "16", *SERVED, connect=lambda model: served)
    assert len(branches) == 16 and len(rows) == 32
    assert {row["agent"] for row in rows if row["advantage"] is not None} == {"player0"}
    turns = [
        turn for row in rows if row["agent"] == "player1" for branch in row["branches"] for turn in branch["turns"]
    ]
    assert turns and {turn["version"] for turn in turns} == {-1}


def test_evaluation_of_the_shipped_model_is_of_what_it_plays(collect):
    """The strategy that is read off its log-probs is the one that it was taught, and the one in its games."""
    rollouts, _, _, rows = collect("--batch-size", "1200", "--eval-samples", "60")
    strategy, env = {}, rollouts.stages[0].env
    rollouts.engine.load_weights(rollouts.engine.model.state_dict().items(), 0)
    for at in INFORMATION_SETS:
        passive, active = (
            math.exp(asyncio.run(rollouts._logprob(env.conversation(*at), word))) for word in MOVES[at[1]]
        )
        assert passive + active > 0.99
        strategy[at] = active / (passive + active)
        assert strategy[at] == pytest.approx(STRATEGY[at], abs=0.1)
    metrics = asyncio.run(rollouts.evaluate(0))
    expected, worth = by_matrix(strategy)
    assert metrics["eval/kuhn-poker/nash_conv"] == pytest.approx(expected) and 0.8 < expected < 1
    assert metrics["eval/kuhn-poker/value"] == pytest.approx(worth)
    assert metrics["eval/kuhn-poker/legal"] > 0.995
    assert metrics["eval/kuhn-poker/player0"] == -metrics["eval/kuhn-poker/player1"]

    seen = {at: [] for at in INFORMATION_SETS}
    for row in rows:
        for at in INFORMATION_SETS:
            before = env.conversation(*at)
            if row["messages"][: len(before)] == before and len(row["messages"]) > len(before):
                seen[at].append(row["messages"][len(before)]["content"] == MOVES[at[1]][1])
    for at, active in seen.items():
        spread = math.sqrt(0.25 / len(active))
        assert len(active) > 20 and abs(np.mean(active) - strategy[at]) < 4 * spread
