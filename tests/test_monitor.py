"""What a run tells: valid JSON lines, times by phase, plain lines or a live panel, and the trackers."""

import io
import json
import math
import os
import struct
import threading
import time
from typing import ClassVar, get_args, get_type_hints

import pytest
from rich.console import Console

import monitor as module
from config import Run
from monitor import TRACKERS, Monitor, RunConsole, check_tracker, read_rows, sparkline, write_whole
from tests.conftest import run_train


def make(tmp_path, terminal=False):
    out = io.StringIO()
    return Monitor(tmp_path, 10, Console(file=out, force_terminal=terminal, width=100, highlight=False)), out


def rows(tmp_path, name="metrics"):
    return [json.loads(line) for line in open(tmp_path / f"{name}.jsonl")]


def test_a_step_is_one_object_and_one_line(tmp_path):
    monitor, out = make(tmp_path)
    monitor.log(1, {"reward/mean": 0.5, "mismatch_kl/mean": 1e-7, "loss/rl": float("nan"), "optim/grad_norm": 1.0})
    monitor.log(2, {"reward/mean": 0.75, "eval/reverse-text/mean": 0.625})
    monitor.close()
    assert rows(tmp_path)[0] == {
        "step": 1,
        "reward/mean": 0.5,
        "mismatch_kl/mean": 1e-7,
        "loss/rl": None,
        "optim/grad_norm": 1.0,
        "time/step": 0,
    }
    assert "step 1/10  reward 0.500" in out.getvalue() and "step 2: eval/reverse-text/mean 0.625" in out.getvalue()
    assert "\x1b" not in out.getvalue(), "plain lines where there is no terminal"


def test_a_nested_phase_counts_for_itself_alone(tmp_path):
    monitor, _ = make(tmp_path)
    with monitor.phase("sample"):
        time.sleep(0.02)
        with monitor.phase("score"):
            time.sleep(0.1)
    monitor.log(1, {"perf/sampled_tokens": 100})
    (row,) = rows(tmp_path)
    assert (
        0.02 <= row["time/sample"] < 0.1 <= row["time/score"]
        and abs(row["time/step"] - row["time/sample"] - row["time/score"]) < 1e-9
    )
    assert row["perf/sampled_tokens_per_s"] == 100 / row["time/sample"] and "perf/sampled_tokens" not in row
    monitor.log(2, {})
    assert rows(tmp_path)[1]["time/step"] == 0, "each step has its own seconds"


def test_text_of_a_model_is_never_markup(tmp_path):
    monitor, out = make(tmp_path)
    monitor.warn("[red]not a colour[/red] [/]")
    assert "[red]not a colour[/red] [/]" in out.getvalue()


def test_a_warning_can_be_given_once(tmp_path):
    monitor, out = make(tmp_path)
    for _ in range(3):
        monitor.warn("twice shy", once="key")
    assert out.getvalue().count("twice shy") == 1


def test_the_live_panel_shows_the_run(tmp_path):
    monitor, out = make(tmp_path, terminal=True)
    for step in range(1, 4):
        monitor.log(step, {"reward/mean": step / 4, "entropy/mean": 0.3})
    monitor.close()
    assert (
        "reward" in out.getvalue()
        and "0.750" in out.getvalue()
        and "▁▅█" in out.getvalue()
        and "3/10" in out.getvalue()
    )


def test_sparkline():
    assert sparkline([]) == "" and sparkline([1.0]) == "▁" and sparkline([0, 1]) == "▁█"
    assert len(sparkline(list(range(1000)), width=60)) == 60


def test_rows_are_read_while_they_are_written(tmp_path):
    path, broken = tmp_path / "metrics.jsonl", []
    path.write_bytes(b'{"step": 1}\n{"step": \xff\n[2]\n{"step": 3}\n{"step": 4}\n{"step": 5')
    assert list(read_rows(path, lambda line: b"4" in line, broken)) == [{"step": 1}, {"step": 3}]
    assert broken == [2, 3], "line 6 is not whole yet"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    """config.json on a disk that is full: --resume must find what was there."""
    for text in ("old", "new"):
        write_whole(tmp_path / "config.json", text)
        assert (tmp_path / "config.json").read_text() == text
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "config.json", "half \ud800")
    assert (tmp_path / "config.json").read_text() == "new"


def test_a_console_without_a_reader_stays_silent(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        monitor = Monitor(tmp_path, 2, RunConsole(file=file))
        for step in (1, 2):
            monitor.log(step, {"reward/mean": 0.5})
            file.write("what goes past the console")
        monitor.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


# Trackers: what any of them is told, with one that remembers it, and then the two there are.


class Recorder:
    package, forgets, where = "json", False, "here"
    began: ClassVar[list] = []

    def __init__(self, run_dir, config, run_id, step):
        self.id, self.name, self.step, self.logged = run_id, config["name"], step, []
        self.began.append(self)

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def close(self):
        self.logged.append("closed")


@pytest.fixture
def recorder(monkeypatch):
    class Fresh(Recorder):
        began: ClassVar[list] = []

    monkeypatch.setitem(TRACKERS, "wandb", Fresh)
    return Fresh


def test_a_tracker_is_told_what_the_records_say(tmp_path, recorder):
    monitor, out = make(tmp_path)
    monitor.track("wandb", {"name": "n"}, {}, 1)
    monitor.log(1, {"reward/mean": 0.5, "loss/rl": math.inf})
    monitor.log(2, {"reward/mean": 0.25})
    monitor.close()
    (told,) = recorder.began
    assert told.name == "n" and monitor.tracked == {"wandb": told.id} and "tracked by wandb: here" in out.getvalue()
    *logged, last = told.logged
    assert last == "closed" and logged[0][1]["loss/rl"] == math.inf, "and not the null that JSON needs"
    assert [{"step": step} | metrics | {"loss/rl": None} for step, metrics in logged] == [
        {"loss/rl": None} | row for row in rows(tmp_path)
    ]


@pytest.mark.parametrize("moment", ["__init__", "log", "close"])
def test_a_tracker_that_fails_is_warned_about_once(moment, tmp_path, recorder, monkeypatch):
    def fail(*_):
        raise OSError("no network")

    monkeypatch.setattr(recorder, moment, fail)
    monitor, out = make(tmp_path)
    monitor.track("wandb", {"name": "n"}, {}, 1)
    for step in (1, 2, 3):
        monitor.log(step, {"reward/mean": 0.5})
    monitor.close()
    assert out.getvalue().count("warning: --track wandb: OSError: no network") == out.getvalue().count("warning") == 1
    assert len(rows(tmp_path)) == 3


def test_a_run_does_not_wait_for_its_tracker(tmp_path, recorder, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(recorder, "log", lambda *_: gate.wait())
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    monitor, out = make(tmp_path)
    monitor.track("wandb", {"name": "n"}, {}, 1)
    monitor.log(1, {"reward/mean": 0.5})
    monitor.close()
    gate.set()
    assert "--track wandb: it has not taken everything in time" in out.getvalue()


@pytest.mark.parametrize(("forgets", "tracked", "told"), [(False, {"wandb": "7"}, [3]), (True, {"wandb": "7"}, [1, 3]), (False, {}, [1, 3])])  # fmt: skip
def test_a_tracker_gets_what_it_has_not(forgets, tracked, told, tmp_path, recorder, monkeypatch):
    """A run goes on from step 2: the tracker knows what was before, or forgot it, or is new."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss/rl": null}\n')
    monkeypatch.setattr(recorder, "forgets", forgets)
    monitor, _ = make(tmp_path)
    monitor.track("wandb", {"name": "n"}, {"tensorboard": "8"} | tracked, 3)
    monitor.log(3, {"reward/mean": 0.5})
    monitor.close()
    (tracker,) = recorder.began
    assert [step for step, _ in tracker.logged[:-1]] == told and (1 not in told or math.isnan(tracker.logged[0][1]["loss/rl"]))  # fmt: skip
    assert monitor.tracked == {"tensorboard": "8", "wandb": tracked.get("wandb", tracker.id)}


def test_a_resumed_run_is_the_same_run_there(tmp_path, recorder):
    given = ["--batch-size", 16, "--eval-every", 0, "--save-every", 1, "--runs-dir", tmp_path, "--name", "run"]
    assert run_train(*given, "--steps", 1, "--track", "wandb") == 0
    assert run_train("--runs-dir", tmp_path, "--name", "run", "--resume", "--steps", 2) == 0
    start = tmp_path / "run" / "checkpoints" / "step_2"
    assert run_train(*given[:-1], "other", "--resume-from", start, "--steps", 3, "--track", "wandb") == 0
    first, second, other = recorder.began
    assert [tracker.step for tracker in recorder.began] == [0, 2, 3] and (second.name, other.name) == ("run", "other")
    assert first.id == second.id != other.id and [step for step, _ in second.logged[:-1]] == [2]


def test_tensorboard_shows_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked = {}
    for start, value in ((1, 0.25), (4, 0.5)):
        monitor, _ = make(tmp_path)
        monitor.track("tensorboard", {"name": "n", "lr": 0.1}, tracked, start)
        for step in range(start, start + 5):
            monitor.log(step, {"reward/mean": value})
        monitor.close()
        tracked = monitor.tracked
    shown = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in shown.Scalars("reward/mean")] == [
        *[(step, 0.25) for step in (1, 2, 3)],
        *[(step, 0.5) for step in (4, 5, 6, 7, 8)],
    ]
    (text,) = {event.tensor_proto.string_val[0] for event in shown.Tensors("config/text_summary")}
    assert b'"lr": 0.1' in text


def test_wandb_works_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setattr(module, "PATIENCE", 120.0)  # of a busy machine
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.25}\n')
    monitor, out = make(tmp_path)
    monitor.track("wandb", {"name": "n", "lr": 0.1}, {"wandb": "abc"}, 1)
    monitor.log(1, {"reward/mean": 0.5})
    monitor.close()
    assert "tracked by wandb: offline" in out.getvalue() and "warning" not in out.getvalue()
    (path,) = tmp_path.glob("wandb/offline-run-*-abc/run-abc.wandb")
    data, start, records = path.read_bytes(), 7, []  # a LevelDB log: chunks with a head of checksum, length and type
    while start < len(data):
        (size,) = struct.unpack("<H", data[start + 4 : start + 6])
        records.append(Record.FromString(data[start + 7 : start + 7 + size]))
        start += 7 + size
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.run_id, run.display_name) == ("abc", "n") and "lr" in {item.key for item in run.config.update}
    history = [record.history.item for record in records if record.HasField("history")]
    values = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in history]  # fmt: skip
    assert [(row["_step"], row["reward/mean"]) for row in values] == [(0, 0.25), (1, 0.5)], "the past, and what is new"


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    class Elsewhere(Recorder):
        package = "no_such_tracker"

    monkeypatch.setitem(TRACKERS, "wandb", Elsewhere)
    monkeypatch.syspath_prepend(tmp_path)
    for make_folder in (False, True):
        if make_folder:
            (tmp_path / "no_such_tracker").mkdir()
        with pytest.raises(ValueError, match="--track wandb: needs the package no_such_tracker: pip install"):
            check_tracker("wandb")
    check_tracker("none")
    assert get_args(get_type_hints(Run)["track"]) == ("none", *TRACKERS)
