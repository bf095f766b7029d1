"""What view.py shows of a run, however its files were left."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

import view as module
from command_line import parse_knobs
from envs.reverse_text import ReverseText
from monitor import write_row
from rollouts import Group, Stage, row_of
from tests.conftest import ROOT
from traces import Episode, Task, Trace, assign_advantages
from view import View, read_metrics, view

ESCAPE = "\x1b[31mred [bold]"


def rollout(step, group, number, reward, text="abc", error=None):
    """A row as training writes it."""
    trace = Trace(reward=reward, messages=[{"role": "user", "content": "Reverse: cba"}, {"role": "assistant", "content": text}])  # fmt: skip
    trace.add_turn([1, 2], [3, 4], [-0.5, -0.5])
    assign_advantages(trace, reward - 0.5 if reward is not None else 0.0)
    episode = Episode(f"0.0.{step}.{group}.{number}", "reverse-text", Task("cba", []), [trace], error)
    episode.stop_reason = "error" if error else "done"
    return row_of(step, Group(group, Stage("reverse-text", ReverseText()), episode.task), episode, trace)


@pytest.fixture
def run(tmp_path):
    """Two steps with two groups of two rollouts each. Line 3 of both records is broken, and the last one not yet whole."""
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"steps": 9, "lr": 0.1, "name": "a", "sources": [{"env": {"name": "reverse-text"}}]}))  # fmt: skip
    metrics = [{"mismatch_kl/mean": 1e-7, "reward/mean": 0.5, "loss/ce": 0.0, "time/train": 2.0}, {"mismatch_kl/mean": float("nan"), "reward/mean": 0.25, "loss/ce": 0.0}]  # fmt: skip
    rows = [
        rollout(1, 0, 0, 0.0), rollout(1, 0, 1, 1.0, "best of all"), rollout(1, 1, 0, 0.25), rollout(1, 1, 1, 0.75),
        rollout(2, 2, 0, 0.125, ESCAPE), rollout(2, 2, 1, None, error="ValueError: its tool broke"), rollout(2, 3, 0, 0.375), rollout(2, 3, 1, 0.875),
    ]  # fmt: skip
    for name, content in (("metrics", [{"step": i} | row for i, row in enumerate(metrics, 1)]), ("rollouts", rows)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for number, row in enumerate(content, 1):
                if number == 3:
                    file.write('{"step": 1, "half\n')
                write_row(file, row)
            file.write('{"step": 3, "group": 4, "episode": "0.0.3.4.0", "mess')
    return folder


def shown(*args, code=0):
    """What a command line shows, through its own parser."""
    out = io.StringIO()
    knobs = parse_knobs([str(arg) for arg in args], View, "")
    assert view(knobs, Console(file=out, width=10_000, highlight=False)) == code
    return out.getvalue()


def test_a_run_in_curves_and_steps(run):
    text = shown(run)
    assert "reverse-text, step 2 of 9, written 0 s ago" in text
    lines = [line.split() for line in text.splitlines()]
    curves = [line for line in lines if line and "/" in line[0] and line[1:2] != ["is"]][1:]
    assert curves[0] == ["mismatch_kl/mean", "▁", "1e-07", "nan", "highest", "1e-07", "at", "1"], "it stands first"
    assert curves[1] == ["reward/mean", "█▁", "0.5", "0.25", "best", "0.5", "at", "1"]
    assert "mismatch_kl/mean is no finite number in step 2" in text and "loss/ce" not in text
    assert ["1", "1e-07", "0.5"] in lines and ["2", "nan", "0.25"] in lines
    assert ["1", "2"] in [line.split() for line in shown(run, "--metrics", "time/*").splitlines()]
    assert ["1", "1e-07", "0.5"] not in [line.split() for line in shown(run, "--last", 1).splitlines()]


def test_a_run_that_has_just_begun(run):
    (run / "metrics.jsonl").write_text('{"step": 0')
    (run / "config.json").unlink()
    assert read_metrics(run) == ({}, None) and "no step is done yet" in shown(run)


def test_the_groups_of_a_step(run):
    head, *groups, last = [line.split() for line in shown(run, "--step", 2).splitlines()]
    assert head[:4] == ["group", "env", "task", "agent"]
    assert groups[0] == "2 reverse-text cba agent 0.125 0.125 - -0.375 0 1 error; 1x ValueError: its tool broke".split()
    assert (
        groups[1] == "3 reverse-text cba agent 0.625 0.375 0.875 -0.125 0.375".split()
        and len(groups) == 2
        and "passed" in last
    )


@pytest.mark.parametrize(
    ("asked", "episodes"),
    [
        (["--step", 1, "--group", 1], ["0.0.1.1.0", "0.0.1.1.1"]),
        (["--episode", "0.0.2.3.1"], ["0.0.2.3.1"]),
        (["--group", 0], ["0.0.1.0.0", "0.0.1.0.1"]),
        (["--errors"], ["0.0.2.2.1"]),
        (["--worst", 2], ["0.0.1.0.0", "0.0.2.2.0"]),
        (["--best", 2, "--step", 2], ["0.0.2.3.1", "0.0.2.3.0"]),
        (["--task", "cba", "--agent", "agent", "--group", 3], ["0.0.2.3.0", "0.0.2.3.1"]),
    ],
)
def test_which_rollouts_are_shown(asked, episodes, run):
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines() if line.endswith("}")]
    assert len(rows) == 8
    (run / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = shown(run, *asked)
    assert [line.split()[5] for line in text.splitlines() if line.startswith("step ")] == episodes
    (run / "rollouts.jsonl").write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    assert shown(run, *asked) == text, "the order of keys in a line is only a way to be quick"


def test_what_is_not_asked_for_is_never_parsed(run, monkeypatch):
    (run / "rollouts.jsonl").write_text((run / "rollouts.jsonl").read_text().replace('{"step": 1, "half\n', ""))
    loads, parsed = json.loads, []
    monkeypatch.setattr(json, "loads", lambda line: parsed.append(line) or loads(line))
    shown(run, "--step", 2, "--group", 3)
    assert len(parsed) == 2


def test_what_a_rollout_says(run):
    text = shown(run, "--step", 2, "--group", 2)
    assert "reward 0.125  advantage -0.375  done  2 tokens sampled in 1 branch" in text
    assert "user: Reverse: cba\nassistant: ␛[31mred [bold]\n" in text and "\x1b" not in text
    assert "reward -" in text and "ValueError: its tool broke" in text
    assert "no rollout, and passed over: line 3 of" in text


def test_calls_reasoning_and_sub_agents_are_shown(run):
    row = rollout(3, 9, 0, 1.0)
    call = {"function": {"name": "add", "arguments": {"a": ESCAPE}}}
    row["messages"] = [{"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}]
    row["messages"].append({"role": "tool", "content": [{"type": "text", "text": "42"}]})
    row["calls"] = {"subagent_call-1": [{"role": "user", "content": "count"}]}
    with open(run / "rollouts.jsonl", "w") as file:
        write_row(file, row)
    text = shown(run, "--best", 1)
    assert 'assistant: hm\n\ncalls add {"a": "\\u001b[31mred [bold]"}' in text
    assert 'tool: [{"type": "text", "text": "42"}]' in text and "-- subagent_call-1\nuser: count" in text


def test_nothing_found_says_what_is_there(run):
    assert "no rollout for --step 7 --group 1; it holds steps 1 to 2" in shown(run, "--step", 7, "--group", 1, code=1)


@pytest.mark.parametrize("asked", [["--step", 2], ["--best", 9], ["--group", 2], ["--errors"]])
def test_rows_of_others_are_passed_over(asked, run):
    """An older version, another program, a disk that lost a block."""
    whole = shown(run, *asked)
    odd = [{"reward": "high"}, {"messages": None}, {"messages": ["said"]}, {"branches": 2}, {"group": None}]
    lines = [json.dumps(rollout(2, 2, 3, 0.5, error="it broke") | change) for change in odd]
    lines += [json.dumps({"step": 2, "group": 2}), "[" * 10**5, "\x00" * 99]
    path = run / "rollouts.jsonl"
    path.write_text("\n".join(lines) + "\n" + path.read_text())
    assert shown(run, *asked).splitlines()[:-1] == whole.splitlines()[:-1]
    (run / "metrics.jsonl").write_text(
        '{"step": null}\n{"step": "x", "a": 1}\n{"step": 1, "a": ' + "9" * 400 + ', "reward/mean": 0.5}\n'
    )
    assert "best 0.5 at 1" in shown(run)


def test_runs_side_by_side(run):
    other = run.parent / "b"
    other.mkdir()
    (other / "config.json").write_text((run / "config.json").read_text().replace('0.1, "name": "a"', '0.2, "name": "b"'))  # fmt: skip
    (other / "metrics.jsonl").write_text('{"step": 5, "reward/mean": 0.75}\n')
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown(run, other).splitlines()]
    assert ["step", "2 of 9", "5 of 9"] in cells and ["lr", "0.1", "0.2"] in cells
    reward = cells.index(["reward/mean", "0.25", "0.75"])
    assert cells[reward + 1] == ["", "best 0.5 at 1", "best 0.75 at 5"]
    assert ["mismatch_kl/mean", "nan", "-"] in cells
    assert not [row for row in cells if row[:1] in (["name"], ["steps"], ["loss/ce"])]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "name the folder of a run"),
        (["."], "no metrics.jsonl there, so it is no run; in ./ there are a"),
        (["c"], "c: no metrics.jsonl there, so it is no run; in ./ there are a"),
        (["a", "--worst", "0"], "--worst 0: must be at least 1"),
        (["a", "--worst", "1", "--best", "1"], "--worst 1: leave --best out"),
        (["a", "a", "--step", "1", "--errors"], "--step 1 --errors: rollouts are shown of one run, and 2 are named"),
        (["a", "--stepp", "1"], "--stepp: no such option; did you mean --step?"),
        (["a", "--metrics", "reward"], "--metrics reward: there is no such metric; there are mismatch_kl/mean"),
    ],
)
def test_mistakes_are_told_in_one_line(asked, said, run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    with pytest.raises(SystemExit) as end:
        shown(*asked)
    error = capsys.readouterr().err
    assert end.value.code == 2 and said in error and error.count("\n") == 1


def test_as_a_script_it_is_light_and_ends_with_its_reader(run):
    with open(run / "rollouts.jsonl", "w") as file:
        for number in range(3000):
            write_row(file, rollout(1, 0, number, 0.5, "x" * 100))
    check = "import sys, runpy; sys.argv[0] = 'view.py'\ntry: runpy.run_path('view.py', run_name='__main__')\nfinally: assert not {'torch', 'transformers'} & set(sys.modules)"  # fmt: skip
    command = [sys.executable, "-c", check, str(run), "--group", "0"]
    reader, writer = os.pipe()
    process = subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    with open(reader) as begun:
        assert begun.readline() == "\n" and begun.readline().startswith("step 1")
    assert process.communicate(timeout=60)[1] == b"" and process.returncode != 0
    done = subprocess.run([*command[:3], "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--episode" in done.stdout and not done.stderr
    assert module.MAIN[:5] == ("mismatch_kl/mean", "rl/ratio/max", "rl/is_masked", "entropy/mean", "optim/grad_norm")
