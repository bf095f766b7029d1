"""What a run tells: valid JSON lines, times by phase, plain lines or a live panel."""

import io
import json
import time

from rich.console import Console

from monitor import Monitor, sparkline


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
