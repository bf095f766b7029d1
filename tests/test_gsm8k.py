"""GSM8K and graders in a worker: what counts as an answer, what as an error, and that the two never look the same."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import ModuleType

import pytest
from rich.console import Console

from command_line import parse
from config import Config, Source
from engines.base import Completion, Engine
from envs.base import Agent
from envs.grading import WORKER_POOL, Pool, equal_math, grade, last_boxed
from envs.gsm8k import GSM8K, read_hub
from make_tiny import text_ids
from monitor import Monitor
from rollouts import Rollouts
from tests.conftest import ROOT
from tests.speaker import RENDERER, play
from traces import Task, Trace

pytest.importorskip("math_verify", reason="needs the extra envs")
FOREVER = "9^{9^{9}}"  # computer algebra works this out digit by digit


def call(function, *args, needs="math", seconds=20.0, pool=WORKER_POOL):
    return pool.call(function, *args, needs=needs, seconds=seconds)


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left():
    before = set(threading.enumerate())
    yield
    WORKER_POOL.close()
    gc.collect()
    children = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    assert "envs.grading" not in children
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)


@pytest.fixture
def data(tmp_path):
    """A file of 30 problems "n + n"."""
    path = tmp_path / "sums.jsonl"
    rows = [
        {"question": f"{n} + {n}?", "answer": f"<<{n}+{n}={2 * n}>>It is {2 * n}.\n#### {2 * n}"} for n in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# What stands in the box


@pytest.mark.parametrize(
    ("text", "answer"),
    [(r"\boxed{18}", "18"), (r"\boxed{1} then \boxed{ 2 }", "2"), (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
     (r"\boxed{\boxed{3}}", "3"), (r"\boxed{\{1\}}", r"\{1\}"), (r"\boxed{a\}}", r"a\}"), (r"\boxed{}", ""),
     ("18", None), ("", None), (r"\boxed{18", None), (r"\boxed{1} \boxed{2", None), (r"\boxed 18", None), (r"\boxed{\frac{1}{2}", None)],
)  # fmt: skip
def test_the_last_box(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [("18", "18", True), ("18", r"\$18.00", True), ("18", r"18\text{ apples}", True), ("18", r"\frac{36}{2}", True),
     ("1,800", "1800", True), ("1800", "1{,}800", True), ("-3", "-3", True), ("0.5", r"\frac12", True), ("18", "x=18", True),
     ("18", "19", False), ("18", "-18", False), ("18", "18, 20", False), ("18", "18 or 20", False), ("18", r"\{18, 20\}", False),
     ("18", "", False), ("18", "eighteen", False), ("18", "}{", False), ("18", "\\", False), ("18", "(" * 99, False),
     ("18", r"\infty", False), ("18", "\x00", False), ("18", "٣", False)],
)  # fmt: skip
def test_math(gold, answer, right):
    assert call(equal_math, gold, answer, needs="math_verify") is right


def test_a_right_answer_that_can_not_be_read_is_an_error():
    with pytest.raises(RuntimeError, match="can not read the right answer"):
        call(equal_math, "", "18", needs="math_verify")


# Workers


def test_from_any_thread_and_beside_a_used_alarm():  # known fault A22
    results = []

    def ask():
        results.append(call(equal_math, "18", "18", needs="math_verify"))
        with pytest.raises(TimeoutError, match="longer than 0.5 seconds"):
            call(equal_math, "18", FOREVER, needs="math_verify", seconds=0.5)
        results.append(call(equal_math, "18", "18", needs="math_verify"))

    rings = []
    handler = signal.signal(signal.SIGALRM, lambda *_: rings.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert signal.getitimer(signal.ITIMER_REAL)[1] == pytest.approx(0.1) and rings
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert results == [True] * 4


def test_what_takes_too_long_raises_and_the_next_is_graded():
    for function, argument in ((time.sleep, 60), (pow, 9)):
        start = time.perf_counter()
        with pytest.raises(TimeoutError):
            call(function, argument, *[10**9] * (function is pow), seconds=0.3)
        assert time.perf_counter() - start < 10
        assert call(abs, -2) == 2


@pytest.mark.parametrize(
    ("function", "argument", "error"),
    [(int, "x", "ValueError"), (os._exit, 3, "exit code 3"), (sys.exit, 0, "SystemExit"), (os.abort, None, "exit code -6"),
     (bytearray, 2**40, "MemoryError"), (complex, 1, "not JSON serializable")],
)  # fmt: skip
def test_what_dies_or_raises_is_an_error(function, argument, error):
    with pytest.raises(RuntimeError, match=error):
        call(function, *[argument] * (argument is not None))
    assert call(abs, -2) == 2


def test_a_worker_knows_no_secrets_writes_no_files_and_its_prints_are_no_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    with contextlib.closing(Pool(1)) as pool:
        assert call(os.getenv, "SOME_TOKEN", pool=pool) is None
        assert call(print, '{"value": 1}', pool=pool) is None
        with pytest.raises(RuntimeError, match="File too large"):
            call(eval, f"open({str(tmp_path / 'x')!r}, 'wb', 0).write(b'1')", pool=pool)
        (worker,) = pool._idle
        worker.kill()
        worker.wait()
        assert call(abs, -2, pool=pool) == 2, "one that died while it waited is replaced"


def test_waiting_for_a_worker_stops_nobody_and_is_outside():
    seen = []

    class Outside:
        def __enter__(self):
            seen.append("in")

        def __exit__(self, *_):
            seen.append("out")

    async def main():
        agent = Agent(Trace(), None, None, Outside)
        slow = asyncio.create_task(grade(agent, time.sleep, 0.5, needs="time", seconds=20))
        beats = 0
        while not slow.done():
            await asyncio.sleep(0.02)
            beats += 1
        return beats

    assert asyncio.run(main()) > 10 and seen == ["in", "out"]


def test_a_process_that_ends_leaves_no_worker(tmp_path):
    script = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from envs.grading import WORKER_POOL
import os, time
print(WORKER_POOL.call(os.getpid, needs="os", seconds=5), flush=True)
if sys.argv[1] == "killed": os.kill(os.getpid(), 9)
"""
    for how in ("ends", "killed"):
        run = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, timeout=60)
        pid, deadline = int(run.stdout), time.perf_counter() + 10
        while os.path.exists(f"/proc/{pid}") and time.perf_counter() < deadline:
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{pid}"), how


# The environment


def test_a_file_is_split_and_its_solutions_are_demonstrations(data):
    env = GSM8K(path=data)
    env.check()
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert (len(train), len(held_out)) == (27, 3)
    assert len({task.key for task in train + held_out}) == 30
    assert [task.key for task in env.tasks("train")] == [task.key for task in train]
    task = next(task for task in train + held_out if task.info["answer"] == "14")
    assert task.prompt[0]["content"].startswith("7 + 7?\n\n") and r"\boxed{}" in task.prompt[0]["content"]
    assert task.info["demonstration"] == "It is 14.\n\\boxed{14}"


def test_two_files_share_no_question(data, tmp_path):
    other = tmp_path / "held-out.jsonl"
    other.write_text('{"question": "7 + 7?", "answer": "#### 14"}\n\n{"question": "1 + 2?", "answer": "3"}\n')
    env = GSM8K(path=data, eval_path=str(other))
    env.check()
    assert [task.info["answer"] for task in env.tasks("eval")] == ["14", "3"]
    assert len(env.tasks("train")) == 29


@pytest.mark.parametrize(
    ("reply", "reward", "formatted"),
    [(r"7 + 7 = 14, so \boxed{14}", 1, 1), (r"\boxed{14.0}", 1, 1), (r"\boxed{15}", 0, 1), ("14", 0, 0), ("", 0, 0),
     (r"\boxed{14", 0, 0), (r"\boxed{14} no, \boxed{15}", 0, 1), (r"\boxed{}", 0, 1), ("\x00\ufffd", 0, 0)],
)  # fmt: skip
def test_rewards(reply, reward, formatted):
    trace = play(GSM8K(), Task("t", [{"role": "user", "content": "7 + 7?"}], {"answer": "14"}), reply)
    assert trace.reward == reward and trace.metrics == {"formatted": formatted}


def test_in_a_run_a_slow_answer_is_an_error_and_a_wrong_one_is_not(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"question": "{n}", "answer": "18"}}\n' for n in range(9)))
    texts = [rf"\boxed{{{answer}}}" for answer in (FOREVER, "17", "18")]

    class Fake(Engine):
        def __init__(self):
            super().__init__(10_000)

        async def generate(self, prompt_ids, sampling):
            ids = [*text_ids(texts[sampling.key[4] % 3]), sampling.stop_token_ids[0]]
            return Completion(ids, [-0.5] * len(ids), "stop", 0)

    env = GSM8K(path=str(data), grading_timeout=0.5)
    config = Config(batch_size=2, sources=[Source(env=env, group_size=3)], constant_batch_size=False).resolved()
    monitor = Monitor(tmp_path / "run", 1, Console(quiet=True))
    rollouts = Rollouts(config, Fake(), RENDERER, monitor)
    _, metrics = asyncio.run(rollouts.collect(1))
    monitor.close()
    assert metrics["rollouts/errored"] == metrics["rollouts/stop_error"] == 1 and metrics["rollouts/finished"] == 3
    assert metrics["reward/gsm8k/mean"] == 0.5 and metrics["env/gsm8k/formatted"] == 1
    rows = [json.loads(line) for line in open(tmp_path / "run" / "rollouts.jsonl")]
    assert [row["reward"] for row in rows] == [None, 0, 1] and "longer than 0.5 seconds" in rows[0]["error"]


# What is refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--env.path", "/no/such.jsonl"], "--env.path /no/such.jsonl: No such file"),
     (["--env.eval-path", "x"], "--env.eval-path x: needs --env.path"),
     (["--env.path", "{folder}"], "Is a directory"),
     (["--env.path", "{bad}"], "line 2 is no"),
     (["--env.path", "{good}", "--env.eval-path", "{bad}"], "--env.eval-path {bad}: line 2"),
     (["--env.path", "{one}"], "1 problems can not be split"),
     (["--env.path", "{good}", "--env.grading-timeout", "0"], "--env.grading-timeout 0"),
     (["--env.path", "{good}", "--env.grading-timeout", "nan"], "--env.grading-timeout nan")],
)  # fmt: skip
def test_one_line_names_the_option(flags, words, data, tmp_path, capsys):
    (tmp_path / "bad").write_text('{"question": "a", "answer": "1"}\n{"question": "b"}\n')
    (tmp_path / "one").write_text('{"question": "a", "answer": "1"}\n')
    names = {"folder": tmp_path, "bad": tmp_path / "bad", "one": tmp_path / "one", "good": data}
    with pytest.raises(SystemExit):
        parse(["--env", "gsm8k", *(flag.format(**names) for flag in flags)])
    error = capsys.readouterr().err
    assert words.format(**names) in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "bad",
    ["[1]", '"text"', "3", "{}", '{"question": 1, "answer": "2"}', '{"question": "a", "answer": "x ####"}', "\x00"],
)
def test_lines_that_are_no_problems(bad, tmp_path):
    path = tmp_path / "file"
    path.write_text(bad + "\n")
    with pytest.raises(ValueError, match=f"--env.path {path}: line 1"):
        GSM8K(path=str(path)).tasks("train")


def test_the_hub(monkeypatch):
    module = ModuleType("datasets")
    rows = {
        "train": [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "#### 2"}],
        "test": [{"question": "b", "answer": "#### 2"}],
    }
    module.load_dataset = lambda name, config, split: rows[split]
    monkeypatch.setitem(sys.modules, "datasets", module)
    read_hub.cache_clear()
    env = GSM8K()
    assert [t.info["answer"] for t in env.tasks("train")] == ["1"] and [
        t.info["answer"] for t in env.tasks("eval")
    ] == ["2"]

    def offline(name, config, split):
        raise ConnectionError("no route\nto host")

    module.load_dataset = offline
    read_hub.cache_clear()
    with pytest.raises(
        ValueError, match="^--env.path is not given, and openai/gsm8k did not come from the hub: no route to host$"
    ):
        env.tasks("train")
    read_hub.cache_clear()


def test_missing_packages_are_named(monkeypatch, data, capsys):
    import envs.gsm8k

    for missing, flags, words in (("datasets", [], "--env.path"), ("math_verify", ["--env.path", data], "math-verify")):
        monkeypatch.setattr(envs.gsm8k, "installed", lambda package, missing=missing: package != missing)
        with pytest.raises(SystemExit):
            parse(["--env", "gsm8k", *flags])
        error = capsys.readouterr().err
        assert words in error and "pip install -e '.[envs]'" in error and error.count("\n") == 1
