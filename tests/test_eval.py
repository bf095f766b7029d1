"""The statistics against counting, and the script: what it counts, writes, refuses, and shares with training."""

import asyncio
import itertools
import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from math import comb
from statistics import fmean
from typing import ClassVar

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from command_line import parse_beside_env
from config import Config, Source
from engines.hf import HFEngine
from envs import ENVS
from envs.base import Env, Player, user
from envs.reverse_text import ReverseText
from eval import Estimate, Evaluation, Report, bootstrap, estimates, outcome, pass_at_k, reward_of
from monitor import Monitor
from policy import model_path
from renderers import make_renderer
from rollouts import Rollouts
from tests.conftest import ROOT
from tests.test_remote import Served, chat_answer
from traces import Episode, Task, Trace

# The numbers.


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_passed_rollout(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(fmean(any(subset) for subset in subsets), abs=1e-15)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.7, 1.0])
def test_pass_at_k_is_unbiased(p):
    """Its mean over all outcomes of n tries is the probability that one of k passes; the plug-in estimate is too low."""
    for n, k in ((5, 1), (5, 3), (16, 4)):
        chances = [comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        truth = 1 - (1 - p) ** k
        assert sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances)) == pytest.approx(truth, abs=1e-12)
        if 0 < p < 1 and k > 1:
            assert sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances)) < truth - 1e-3


def test_pass_at_k_of_large_numbers_and_of_impossible_ones():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, abs=1e-12), "one of 10000 is among 100 of them"
    assert pass_at_k(2000, 1000, 1000) == 1.0 and pass_at_k(3, 0, 3) == 0.0
    for n, c, k in ((4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0), (0, 0, 1)):
        with pytest.raises(ValueError, match=f"pass@{k} of {n} rollouts"):
            pass_at_k(n, c, k)


@pytest.mark.parametrize("values", [(0, 0, 1), (0, 0, 0, 1), (0.5, 0.1, 0.9, 0.3)])
def test_the_bootstrap_against_all_resamples(values):
    """For a few values all resamples can be listed: the quantiles of their means."""
    means = [fmean(resample) for resample in itertools.product(values, repeat=len(values))]
    low, high = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    assert bootstrap(values) == pytest.approx((low, high), abs=0.03 if len(set(values)) > 2 else 1e-9)
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3)


def test_the_bootstrap_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = []
    for seed in range(80):
        low, high = bootstrap(rng.beta(2.0, 6.0, size=40), seed)
        covered.append(low <= 0.25 <= high)
    assert 0.86 <= fmean(covered) <= 1.0, (
        "the standard error is 0.024; percentile intervals of 40 values are a little short"
    )
    assert bootstrap([0.5] * 7) == (0.5, 0.5)


def test_estimates_by_hand():
    """Four rollouts each, of which the second task lost two to errors and the third all."""
    rewards = [[1.0, 0.0, 0.5, 0.0], [0.5, 1.0], [], [0.0, 0.0, 0.0, 0.0]]
    found = estimates(rewards, n=4, k=3, threshold=1.0, seed=0)
    assert list(found) == ["avg@4", "pass@1", "pass@2", "pass@3"]
    assert found["avg@4"].mean == pytest.approx((0.375 + 0.75 + 0) / 3) and found["avg@4"].tasks == 3
    assert found["pass@1"].mean == pytest.approx((1 / 4 + 1 / 2 + 0) / 3)
    assert found["pass@2"].mean == pytest.approx((1 / 2 + 1 + 0) / 3) and found["pass@2"].tasks == 3
    assert found["pass@3"].mean == pytest.approx((3 / 4 + 0) / 2) and found["pass@3"].tasks == 2
    assert estimates(rewards, 4, 1, 0.5, 0)["pass@1"].mean == pytest.approx((2 / 4 + 1 + 0) / 3), "a lower threshold"
    assert found["avg@4"].low <= found["avg@4"].mean <= found["avg@4"].high
    nothing = estimates([[], []], n=4, k=1, threshold=1.0, seed=0)["pass@1"]
    assert str(nothing) == "-" and nothing.tasks == 0 and math.isnan(nothing.mean)


def episode(*rewards, stop_reason="done", error=None):
    traces = [Trace(f"player{i}", reward=reward) for i, reward in enumerate(rewards)]
    return Episode("0", "x", Task("t", []), traces, error, stop_reason)


def test_what_became_of_a_rollout():
    assert outcome(episode(1.0), 1.0) == outcome(episode(1.0, stop_reason="context"), 1.0) == "passed"
    assert outcome(episode(0.9), 1.0) == "failed" and outcome(episode(0.9), 0.9) == "passed"
    for reason in ("max_new_tokens", "max_turns", "context"):
        assert outcome(episode(0.0, stop_reason=reason), 1.0) == "truncated"
    for broken in (episode(None), episode(math.nan), episode(1.0, error="boom")):
        assert outcome(broken, 1.0) == "errored" and reward_of(broken) is None
    half = episode(1.0, None)
    assert outcome(half, 1.0) == "passed", "who was never asked has no say"
    half.traces[1].add_turn([1], [2], [-1.0])
    assert outcome(half, 1.0) == "errored"
    pair = episode(1.0, 0.0)
    assert reward_of(pair) == 0.5
    pair.traces[1].trainable = False
    assert reward_of(pair) == 1.0, "a served or scripted opponent's reward is not the model's"


def test_notes_say_what_was_left_out():
    found = {"avg@2": Estimate(1, 1, 1, 4), "pass@1": Estimate(1, 1, 1, 4), "pass@2": Estimate(1, 1, 1, 3)}
    report = Report("m", found, Counter(passed=7, errored=1), {}, None, 1.0)
    assert report.notes() == [
        "m: errored, and left out of their tasks' n: 1 of 8 rollouts",
        "m: of 4 tasks, pass@2 is over 3",
    ]
    assert Report("m", found, Counter(passed=8), {}, None, 1.0).notes() == ["m: of 4 tasks, pass@2 is over 3"]


# The command line.


def parsed(*args):
    return parse_beside_env(args, Evaluation, "reverse-text", "")


def test_what_a_command_line_says():
    args, env = parsed("-k", "4", "--env", "reverse-text", "--env.max-words", "2")
    assert args.k == 4 and env == ReverseText(max_words=2) and args.chosen() == ["tiny"]
    assert parsed("--models", "a", "b")[0].chosen() == parsed("--model", "a", "--model", "b")[0].chosen() == ["a", "b"]
    served = ("--served.name", "q", "--served.base-url", "http://localhost:1/v1")
    assert parsed(*served)[0].chosen() == [] and parsed(*served, "--model", "a")[0].chosen() == ["a"]
    for flags, tokens in (
        ((), 96), (("--model", "smollm2"), 24), (("--models", "tiny", "smollm2"), 96), (("--models", "a", "smollm2"), 512),
        (served, 512), ((*served, "--model", "smollm2"), 512), (("--model", "smollm2", "--max-new-tokens", "7"), 7),
    ):  # fmt: skip
        assert parsed(*flags)[0].longest_completion() == tokens, flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-k", "5", "--rollouts", "4"], "--k 5: pass@5 needs at least 5 rollouts of a task, --rollouts is 4"),
        (["-k", "0"], "--k 0: must be at least 1"),
        (["--rollouts", "0"], "--rollouts 0: must be at least 1"),
        (["--env", "nope"], "--env nope: choose one of reverse-text"),
        (["--env.max-number", "3"], "--env.max-number belongs to --env arithmetic"),
        (["--env.max-words", "0"], "--env.max-words 0"),
        (["--lr", "1"], "--lr: no such option"),
        (["--temprature", "1"], "did you mean --temperature?"),
        (["--temperature", "-1"], "--temperature -1"),
        (["--top-p", "0"], "--top-p 0"),
        (["--top-k", "0"], "--top-k 0"),
        (["--threshold", "nan"], "--threshold nan"),
        (["--samples", "0"], "--samples 0"),
        (["--served.name", "q"], "--served.base-url"),
        (["--served.base-url", "http://localhost:1/v1"], "--served.name"),
        (["--out", str(ROOT / "README.md")], "exists; choose another name"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        parsed(*flags)
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("script", ["eval.py", "chat.py"])
def test_help_comes_before_torch(script):
    code = f"import sys, runpy; sys.argv = [{script!r}, '--help']; sys.path.insert(0, '.')\ntry:\n    runpy.run_path({script!r}, run_name='__main__')\nfinally:\n    assert not {{'torch', 'transformers'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--temperature" in done.stdout and "--env" in done.stdout, done.stderr


# The script, in this process.


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """run(*flags, code=0) -> (stdout, stderr, rows of --out)."""
    handler = signal.getsignal(signal.SIGINT)

    def script(*flags, code=0):
        out = tmp_path / f"{time.monotonic_ns()}.jsonl"
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, flags), "--out", str(out)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
        shown, err = capfd.readouterr()
        assert int(end.value.code) == code, shown + err
        return shown, err, [json.loads(line) for line in open(out)] if out.exists() else []

    yield script
    signal.signal(signal.SIGINT, handler)


def row_of_table(shown, name):
    (line,) = [line for line in shown.splitlines() if line.replace("│", " ").strip().startswith(f"{name} ")]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_the_table_is_what_the_samples_say(run):
    shown, _, rows = run("--model", "tiny", "--env", "reverse-text", "-k", 2, "--rollouts", 3, "--samples", 5,
                         "--threshold", 0.5, "--env.max-words", 1)  # fmt: skip
    tasks = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row["reward"])
    assert len(tasks) == 5 and all(len(rewards) == 3 for rewards in tasks.values())
    assert sorted({row["rollout"] for row in rows}) == [0, 1, 2] and {row["model"] for row in rows} == {"tiny"}
    (average,), (first,), (second,) = (row_of_table(shown, name) for name in ("avg@3", "pass@1", "pass@2"))
    assert average.startswith(f"{fmean(map(fmean, tasks.values())):.3f} [")
    passed = [sum(reward >= 0.5 for reward in rewards) for rewards in tasks.values()]
    assert first.startswith(f"{sum(passed) / 15:.3f} [")
    assert second.startswith(f"{fmean(1 - comb(3 - c, 2) / 3 for c in passed):.3f} [")
    assert row_of_table(shown, "passed") == [str(sum(passed))] and row_of_table(shown, "rollouts") == ["15"]
    assert Counter(row["outcome"] for row in rows)["passed"] == sum(passed)
    assert all(row["messages"][0]["content"] == f"Reverse: {row['task']}" for row in rows)


def test_training_evaluates_in_the_same_way(run, tmp_path):
    """The first rollout of each task is the one of train.py's evaluation at step 0."""
    _, _, rows = run("--samples", 6, "-k", 2, "--seed", 5, "--at-once", 3)
    path = ROOT / "models" / "tiny" / "reverse-text"
    config = Config(sources=[Source(env=ReverseText())], eval_samples=6, seed=5).resolved()
    renderer = make_renderer("auto", AutoTokenizer.from_pretrained(path), "qwen3")
    monitor = Monitor(tmp_path / "run", 1, Console(quiet=True))
    engine = HFEngine(path, max_context=config.seq_len)
    metrics = asyncio.run(Rollouts(config, engine, renderer, monitor).evaluate(0))
    monitor.close()
    assert metrics["eval/reverse-text/mean"] == pytest.approx(
        fmean(row["reward"] for row in rows if row["rollout"] == 0)
    )
    assert metrics["eval/reverse-text/errored"] == 0
    replies = [row["messages"][-1]["content"] for row in rows]
    assert len(set(replies)) > 6, "the second rollouts are others"


def test_models_side_by_side_and_the_same_again(run):
    both = ("--models", ROOT / "models/tiny/base", "tiny", "--env", "arithmetic", "--samples", 4, "--max-new-tokens", 3)
    shown, _, rows = run(*both)
    assert len(row_of_table(shown, "avg@1")) == 2 and len(rows) == 8
    again, _, rows_again = run(*both)
    seconds = [[line for line in text.splitlines() if "seconds" not in line] for text in (shown, again)]
    assert seconds[0] == seconds[1] and rows == rows_again
    _, _, others = run(*both, "--seed", 1)
    assert [row["messages"] for row in others] != [row["messages"] for row in rows]
    _, _, greedy = run(*both, "--top-k", 1)
    _, err, cold = run(*both, "--temperature", 0, "-k", 2)
    assert "says the same in all of them" in err
    assert [row["messages"] for row in cold if row["rollout"] == 0] == [row["messages"] for row in greedy]


def test_cut_replies_are_truncated_and_not_errors(run):
    shown, _, rows = run("--samples", 4, "--max-new-tokens", 1)
    assert {row["stop_reason"] for row in rows} == {"max_new_tokens"} and {row["outcome"] for row in rows} == {
        "truncated"
    }
    assert row_of_table(shown, "truncated") == ["4"] and row_of_table(shown, "failed") == ["0"]


@dataclass
class Fragile(Env):
    """Breaks for the third rollout of the second task, and in `broken` always."""

    broken: bool = False
    empty: bool = False
    played: int = 0

    def tasks(self, split):
        return [] if self.empty or split == "train" else [Task(f"{i}", [user("?")]) for i in range(3)]

    async def play(self, task, agent):
        self.played += 1
        await agent.say(*task.prompt)
        if self.broken or (task.key == "1" and self.played % 3 == 0):
            raise RuntimeError("a wall [bold]fell[/]\x1b[2J")
        agent.trace.reward = True


def test_errors_are_left_out_and_told(run, monkeypatch):
    monkeypatch.setitem(ENVS, "fragile", Fragile)
    fragile = ("--env", "fragile", "-k", 3, "--max-new-tokens", 2, "--at-once", 1)
    shown, err, rows = run(*fragile)
    assert Counter(row["outcome"] for row in rows) == {"passed": 8, "errored": 1}
    assert row_of_table(shown, "avg@3") == ["1.000 [1.000, 1.000]"] and row_of_table(shown, "errored") == ["1"]
    assert (
        "tiny: errored, and left out of their tasks' n: 1 of 9 rollouts" in shown
        and "of 3 tasks, pass@3 is over 2" in shown
    )
    assert "a wall [bold]fell[/]␛[2J" in err and "\x1b" not in err
    shown, _, _ = run(*fragile, "--env.broken", code=1)
    assert row_of_table(shown, "avg@3") == ["-"] and row_of_table(shown, "errored") == ["9"]
    _, err, _ = run(*fragile, "--env.empty", code=2)
    assert err.splitlines()[-1] == "eval.py: --env fragile: it has no held-out tasks"


@dataclass
class Duel(Env):
    """Two speak; the first wins."""

    agents: ClassVar = ("player0", "player1")
    player1: Player = field(default_factory=Player)

    def tasks(self, split):
        return [Task("a", [user("?")])]

    async def play(self, task, player0, player1):
        for player, reward in ((player0, 1.0), (player1, 0.0)):
            await player.say(*task.prompt)
            player.trace.reward = reward


def test_a_served_opponent_plays_and_is_not_evaluated(run, monkeypatch):
    monkeypatch.setitem(ENVS, "duel", Duel)
    shown, _, _ = run("--env", "duel", "--max-new-tokens", 2)
    assert row_of_table(shown, "avg@1") == ["0.500 [0.500, 0.500]"], "both are the model: the mean of the two"
    server = Served()
    opponent = ("--env.player1.model.name", "teacher", "--env.player1.model.base-url", server.url)
    try:
        shown, err, rows = run("--env", "duel", "--max-new-tokens", 2, *opponent)
    finally:
        server.close()
    assert row_of_table(shown, "avg@1") == ["1.000 [1.000, 1.000]"] and "teacher at" in err
    assert row_of_table(shown, "player1") == ["0.000"] and row_of_table(shown, "tokens per rollout") == ["2.0"]
    assert rows[1]["agent"] == "player1" and rows[1]["messages"][-1]["content"] == "hi"


def test_a_model_that_is_not_there_is_told_before_another_is_evaluated(run):
    _, err, rows = run("--models", "tiny", "/does/not/exist", code=2)
    assert "eval.py: --model /does/not/exist" in err and not rows and "Traceback" not in err


@pytest.mark.parametrize("text", ["[]", '{"dtype": "auto"}', '{"model_type": "qwen3", "hidden_size": "x"}'])
def test_a_config_that_is_no_model_s_is_told(run, text, tmp_path):
    shutil.copytree(ROOT / "models" / "tiny" / "base", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(text)
    _, err, rows = run("--model", tmp_path / "model", code=2)
    assert f"eval.py: --model {tmp_path / 'model'}" in err and not rows and "Traceback" not in err


def test_a_device_that_is_none_is_told(run):
    _, err, _ = run("--device", "banana", code=2)
    assert "eval.py: --device banana: must be auto, cpu, cuda or cuda:N" in err


def test_a_run_is_no_model_and_its_checkpoints_are_named(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").touch()
    with pytest.raises(
        ValueError, match=r"--model .*mine: is a run; name one of its checkpoints, .*mine/checkpoints/step_<n>"
    ):
        model_path(str(tmp_path / "mine"), "base")


def test_a_served_model_beside_a_loaded_one(run):
    """By messages. A reply that was cut inside its reasoning is truncated; one that the server refuses is an error."""
    server = Served()
    replies = {1: chat_answer("", "length", reasoning_content="so 2 and"), 2: (400, {"error": {"message": "no"}})}
    asked = []

    def chat(body, number):
        text = body["messages"][0]["content"]
        if "Compute " not in text:
            return chat_answer("?")  # the preflight asks what may be asked
        asked.append(body)
        right = str(sum(int(part) for part in text.split("Compute ")[1].split(".")[0].split("+")))
        return replies.get(len(asked) - 1, chat_answer(f" It is {right}\n<|im_end|> ü"))

    server.answers = {"/tokenize": lambda body, number: (404, {}), "/chat/completions": chat}
    served = ("--served.name", "teacher", "--served.base-url", server.url, "--served.retries", 0)
    try:
        shown, err, rows = run(*served, "--model", "tiny", "--env", "arithmetic", "--samples", 4, "--at-once", 1,
                               "--max-new-tokens", 7, "--temperature", 0.5)  # fmt: skip
        _, refused, _ = run(*served, "--top-k", 5, code=2)
    finally:
        server.close()
    assert "asked by messages" in refused
    own = [row for row in rows if row["model"] == "teacher"]
    assert [row["outcome"] for row in own] == ["passed", "truncated", "errored", "passed"], err
    assert own[0]["messages"][-1]["content"].strip().endswith("<|im_end|> ü")
    assert own[1]["messages"][-1]["reasoning_content"] == "so 2 and"
    assert row_of_table(shown, "passed")[0] == "2" and len(row_of_table(shown, "passed")) == 2
    assert row_of_table(shown, "tokens per rollout")[0] == "-", "its tokens are not known"
    assert asked[0]["max_tokens"] == 7 and asked[0]["temperature"] == 0.5
    assert "teacher: errored, and left out of their tasks' n: 1 of 4 rollouts" in shown


def test_ctrl_c_leaves_whole_lines_and_no_traceback(tmp_path):
    command = [sys.executable, "eval.py", "--samples", "4000", "-k", "4", "--at-once", "4", "--out", tmp_path / "out"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    deadline = time.time() + 60
    while time.time() < deadline and not ((tmp_path / "out").exists() and (tmp_path / "out").stat().st_size):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in out + err, err
    assert all(json.loads(line)["model"] == "tiny" for line in open(tmp_path / "out"))
