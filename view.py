"""Read runs in the terminal: is it healthy, what was sampled, and what was made of it?

    python view.py runs/mine                              # the main metrics as curves, the last steps as a table
    python view.py runs/mine --metrics 'time/*' optim/lr  # others
    python view.py runs/mine --step 12                    # the groups of a step with their rewards and advantages
    python view.py runs/mine --step 12 --group 95         # what was said in one of them
    python view.py runs/mine --episode 0.0.12.95.1        # what was said in one episode
    python view.py runs/mine --worst 3                    # the rollouts with the lowest rewards, of a step with --step
    python view.py runs/mine --errors                     # those that broke
    python view.py runs/a runs/b                          # side by side, with the knobs in which they differ

Reads metrics.jsonl and rollouts.jsonl, of a run that is still going on as well. rollouts.jsonl may be larger than memory: it is
read line by line, and what is not asked for is passed over unparsed. What a model wrote is shown and never executed: control
characters appear as signs (an escape as ␛), markup as it stands. Nothing here imports torch.
"""

import fnmatch
import heapq
import json
import math
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from command_line import parse_knobs
from config import fail, option, require
from monitor import RECORDS, read_rows, sparkline, visible

METRICS, ROLLOUTS = RECORDS
# Whether sampler and trainer are still one policy stands first: a run that diverges shows it there before its reward falls.
MAIN = (
    "mismatch_kl/mean", "rl/ratio/max", "rl/is_masked", "entropy/mean", "optim/grad_norm", "reward/mean", "eval/*/mean",
    "loss/*", "rollouts/errored", "rollouts/truncated", "rollouts/no_signal", "off_policy/mean", "time/step",
)  # fmt: skip
IN_STEPS = 7  # patterns of MAIN that have a column in the table of steps, which is as wide as a terminal
GOOD = (
    "reward/*",
    "eval/*/mean",
)  # of these the highest value is the best; of entropy the lowest tells, of others the highest
STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


@dataclass(kw_only=True)
class View:
    """Which runs, and what of them."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """folders of runs, e.g. runs/mine; several are shown side by side"""
    metrics: tuple[str, ...] = ()
    """names of metrics or patterns such as 'eval/*', in place of the main ones"""
    last: int = 10
    """steps in the table"""

    step: int | None = None
    """the groups of this step; with another choice of rollouts, those of this step"""
    group: int | None = None
    """messages of this group, by its number over the whole run"""
    episode: str | None = None
    """messages of this episode, by its id"""
    task: str | None = None
    """messages of rollouts of this task, by its key"""
    agent: str | None = None
    """only this agent's rollouts"""
    errors: bool = False
    """messages of rollouts that broke"""
    worst: int | None = None
    """messages of so many rollouts with the lowest rewards"""
    best: int | None = None
    """messages of so many rollouts with the highest rewards"""

    def check(self) -> None:
        """Raise ValueError, naming option and value, for what can not work."""
        if not self.runs:
            raise ValueError("name the folder of a run: python view.py runs/NAME")
        for run in self.runs:
            if not (run / METRICS).is_file():
                folder = run if run.is_dir() else run.parent
                there = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
                known = f"; in {folder}/ there are {', '.join(there)}" if there else ""
                raise ValueError(f"{run}: no {METRICS} there, so it is no run{known}")
        for name in ("last", "worst", "best"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "must be at least 1")
        require(self.worst is None or self.best is None, "worst", self.worst, "leave --best out, or ask twice")
        if self.chosen and len(self.runs) > 1:
            raise ValueError(f"{self.words()}: rollouts are shown of one run, and {len(self.runs)} are named")
        if self.chosen and not (self.runs[0] / ROLLOUTS).is_file():
            raise ValueError(f"{self.words()}: {self.runs[0]} has no {ROLLOUTS}")

    @property
    def chosen(self) -> list[str]:
        """The options that choose rollouts, among those that were given."""
        names = ("step", "group", "episode", "task", "agent", "errors", "worst", "best")
        return [name for name in names if getattr(self, name) is not None and getattr(self, name) is not False]

    def words(self) -> str:
        """The same as they were written."""
        values = {name: getattr(self, name) for name in self.chosen}
        return " ".join(option(name) if value is True else f"{option(name)} {value}" for name, value in values.items())


# What the files hold.


@dataclass
class Series:
    """A metric over the steps that have it. What is not finite is NaN (null in the file)."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def finite(self) -> list[tuple[float, int]]:
        """(value, step) where there is one."""
        return [(value, step) for step, value in zip(self.steps, self.values) if math.isfinite(value)]


def read_metrics(run: Path) -> tuple[dict[str, Series], int | None]:
    """(every metric by its name, the last step), the latter None before any."""
    found: dict[str, Series] = defaultdict(Series)
    step = None
    for row in read_rows(run / METRICS, fits=lambda row: isinstance(row.get("step"), int)):
        step = row.pop("step")
        for name, value in row.items():
            if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63):
                found[name].steps.append(step)
                found[name].values.append(math.nan if value is None else value)
    return found, step


def choose(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that a pattern fits, in the order of the patterns."""
    return list(dict.fromkeys(name for pattern in patterns for name in names if fnmatch.fnmatchcase(name, pattern)))


# What a rollout must hold to be shown.
KINDS = {
    "step": int, "group": int, "episode": str, "env": str, "task": str, "agent": str, "stop_reason": str, "error": str | None,
    "reward": int | float | None, "advantage": int | float | None, "metrics": dict, "messages": list, "branches": list,
}  # fmt: skip
# How a line of rollouts.jsonl begins: enough to pass over most lines without parsing them.
HEAD = re.compile(rb'\{"step": (\d+), "group": (\d+), "episode": "([^"\\]*)", ')


class Rollouts:
    """The rows of a run's rollouts.jsonl that a command line asks for, and what was met on the way to them."""

    def __init__(self, run: Path, args: View) -> None:
        self.path, self.args = run / ROLLOUTS, args
        self.steps: set[int] = set()
        self.broken: list[int] = []  # lines that are no rollout

    def __iter__(self) -> Iterator[dict[str, Any]]:
        asked = {name: getattr(self.args, name) for name in ("step", "group", "episode", "task", "agent")}
        asked = {name: value for name, value in asked.items() if value is not None}

        def elsewhere(line: bytes) -> bool:
            head = HEAD.match(line)
            if head is None:
                return False
            found = {"step": int(head[1]), "group": int(head[2]), "episode": head[3].decode(errors="replace")}
            self.steps.add(found["step"])
            return any(asked.get(name, value) != value for name, value in found.items())

        def fits(row: dict[str, Any]) -> bool:
            known = all(name in row and isinstance(row[name], kind) for name, kind in KINDS.items())
            return known and all(isinstance(part, dict) for part in (*row["messages"], *row["branches"]))

        for row in read_rows(self.path, elsewhere, self.broken, fits):
            if all(row.get(name) == value for name, value in asked.items()) and (
                row.get("error") or not self.args.errors
            ):
                yield row


# What is shown.


def number(value: float | None) -> str:
    """Three significant digits."""
    return "-" if value is None else "nan" if math.isnan(value) else f"{value:.3g}"


def line_of(text: Any, width: int = 60) -> Text:
    """Text of anyone as a piece of one line."""
    flat = visible(str(text)).replace("\n", "⏎").replace("\t", " ")
    return Text(flat if len(flat) <= width else flat[: width - 1] + "…")


def ago(seconds: float) -> str:
    """A duration in one unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def read_config(run: Path) -> dict[str, Any]:
    """config.json, flat: sources.0.env.name and so on; empty where there is none."""
    try:
        config = json.loads((run / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}

    def flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
        if not inner:
            yield name, value
        else:
            for key, item in inner:
                yield from flat(item, f"{name}.{key}" if name else str(key))

    return dict(flat(config, ""))


def extreme(name: str, series: Series) -> str:
    """The value that tells most, with its step."""
    if not series.finite:
        return "-"
    good, low = any(fnmatch.fnmatchcase(name, pattern) for pattern in GOOD), name.startswith("entropy/")
    value, step = min(series.finite) if low else max(series.finite, key=lambda pair: pair[0])
    return f"{'best' if good else 'lowest' if low else 'highest'} {number(value)} at {step}"


def names_asked(args: View, runs: Sequence[dict[str, Series]]) -> list[str]:
    """The metrics to show: those asked for, or of the main ones those that some run has and uses (a component of the loss that is
    always 0 is none)."""
    there = list(dict.fromkeys(name for metrics in runs for name in metrics))
    for pattern in args.metrics:
        if not choose(there, [pattern]):
            fail(visible(f"--metrics {pattern}: there is no such metric; there are {', '.join(there) or 'none yet'}"))

    def is_used(name: str) -> bool:
        return not name.startswith("loss/") or any(any(metrics[name].values) for metrics in runs if name in metrics)

    return choose(there, args.metrics) if args.metrics else choose(list(filter(is_used, there)), MAIN)


def show_run(args: View, console: Console) -> None:
    """A run's metrics: a line for each with its curve, and the last steps as a table."""
    (run,) = args.runs
    metrics, step = read_metrics(run)
    config = read_config(run)
    written = ago(max(0.0, time.time() - (run / METRICS).stat().st_mtime))
    of = f" of {config['steps']}" if "steps" in config else ""
    what = [str(config[key]) for key in ("sources.0.algo.name", "sources.0.env.name", "model") if key in config]
    done = "no step is done yet" if step is None else f"step {step}{of}, written {written} ago"
    console.print(Text(f"{run}: {', '.join([*map(visible, what), done])}"))
    names = names_asked(args, [metrics])
    if not names:
        return
    table = Table("", "curve", "first", "last", "", box=None, pad_edge=False)
    for name in names:
        series = metrics[name]
        curve = sparkline([value for value, _ in series.finite], 40)
        last = Text(number(series.values[-1]), style="red" if math.isnan(series.values[-1]) else "")
        table.add_row(line_of(name), Text(curve, style="green"), number(series.values[0]), last, extreme(name, series))
    console.print(table)
    for name in names:
        lost = [step for step, value in zip(metrics[name].steps, metrics[name].values) if math.isnan(value)]
        if lost:
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            console.print(
                Text(f"{name} is no finite number in step {', '.join(map(str, lost[:5]))}{more}", style="red")
            )

    columns = names if args.metrics else choose(names, MAIN[:IN_STEPS])
    cells = {name: dict(zip(metrics[name].steps, metrics[name].values)) for name in columns}
    steps = sorted({step for column in cells.values() for step in column})[-args.last :]
    table = Table("step", box=None, pad_edge=False)
    for name in columns:
        table.add_column(Text(visible(name).replace("/", "\n", 1)), justify="right", overflow="fold")
    for step in steps:
        table.add_row(str(step), *[number(cells[name][step]) if step in cells[name] else "" for name in columns])
    console.print(Text())
    console.print(table)


def show_side_by_side(args: View, console: Console) -> None:
    """The last value of each metric and the one that tells most, and the knobs that differ: a column for each run."""
    read = [read_metrics(run) for run in args.runs]
    configs = [read_config(run) for run in args.runs]
    table = Table("")
    for run in args.runs:
        table.add_column(line_of(run), justify="right", overflow="fold")
    steps = [f"{'-' if step is None else step} of {config.get('steps', '?')}" for (_, step), config in zip(read, configs)]  # fmt: skip
    table.add_row("step", *steps)
    for name in names_asked(args, [metrics for metrics, _ in read]):
        columns = [metrics.get(name) for metrics, _ in read]
        cells = ["-" if column is None else f"{number(column.values[-1])}\n{extreme(name, column)}" for column in columns]  # fmt: skip
        table.add_row(line_of(name), *cells)
    table.add_section()
    for knob in dict.fromkeys(knob for config in configs for knob in config if knob not in ("name", "runs_dir")):
        values = [config.get(knob, "-") for config in configs]
        if any(value != values[0] for value in values):
            table.add_row(line_of(knob), *map(line_of, values))
    console.print(table)


def show_groups(rollouts: Rollouts, console: Console) -> int:
    """The groups of a step, a line for each trained or other agent: what was asked, rewards and advantages in the order of play.
    Returns how many there are."""
    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for row in rollouts:  # messages are let go at once: a step may hold many
        kept = {name: row[name] for name in ("reward", "advantage", "error", "stop_reason")}
        groups[row["group"], row["env"], row["task"], row["agent"]].append(kept)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("group", "env", "task", "agent", "mean", "rewards", "advantages", "ended otherwise"):
        table.add_column(title, overflow="fold")
    for (group, env, task, agent), rows in groups.items():
        known = [row["reward"] for row in rows if row["reward"] is not None]
        ended = Counter(row["stop_reason"] for row in rows if row["stop_reason"] != "done")
        errors = Counter(row["error"] for row in rows if row["error"])
        told = [f"{count} {reason}" for reason, count in ended.items()]
        told += [f"{count}x {error}" for error, count in errors.most_common(1)]
        rewards, advantages = (" ".join(number(row[name]) for row in rows) for name in ("reward", "advantage"))
        mean = number(fmean(known)) if known else "-"
        table.add_row(str(group), line_of(env), line_of(task, 30), line_of(agent), mean, rewards, advantages, line_of("; ".join(told)))  # fmt: skip
    if groups:
        console.print(table)
    return len(groups)


def show_rollout(row: dict[str, Any], console: Console) -> None:
    """What one agent saw and did in an episode, and what that was worth."""
    sampled = sum(branch["sampled"] for branch in row["branches"])
    head = (
        f"step {row['step']}  group {row['group']}  episode {row['episode']}  {row['env']}  agent {row['agent']}  "
        f"reward {number(row['reward'])}  advantage {number(row['advantage'])}  {row['stop_reason']}  "
        f"{sampled} tokens sampled in {len(row['branches'])} branch{'es' if len(row['branches']) != 1 else ''}"
    )
    console.print(Text())
    console.print(Text(visible(head), style="bold"))
    if row["metrics"]:
        values = "  ".join(f"{name} {number(value)}" for name, value in row["metrics"].items())
        console.print(Text(visible(values), style="dim"))
    if row["error"]:
        console.print(Text(visible(row["error"]), style="red"))
    for message in row["messages"]:
        show_message(message, console)
    for call, messages in row.get("calls", {}).items():
        console.print(Text(f"-- {visible(call)}", style="bold dim"))
        for message in messages:
            show_message(message, console)


def show_message(message: dict[str, Any], console: Console) -> None:
    """Role, reasoning (dim), content, tool calls (dim)."""
    role, content = str(message.get("role")), message.get("content")
    text = Text(f"{visible(role)}: ", style=f"bold {STYLES.get(role, '')}".strip())
    if message.get("reasoning_content"):
        text.append(visible(message["reasoning_content"].strip("\n")) + "\n", style="not bold dim")
    said = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    text.append(visible(said), style="not bold default")
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        given = call.get("raw") if "error" in call else json.dumps(function.get("arguments"), ensure_ascii=False)
        text.append(visible(f"\ncalls {function.get('name', '')} {given}"), style="not bold dim")
    console.print(text)


def view(args: View, console: Console) -> int:
    """Show what is asked for. Returns the exit code: 1 where no rollout is as was asked."""
    if not args.chosen:
        (show_run if len(args.runs) == 1 else show_side_by_side)(args, console)
        return 0
    rollouts = Rollouts(args.runs[0], args)
    if args.chosen in (["step"], ["step", "agent"]):
        shown = show_groups(rollouts, console)
    else:
        rows: Any = rollouts
        if args.worst or args.best:  # holds so many rows and no more
            pick = heapq.nsmallest if args.worst else heapq.nlargest
            rewarded = (row for row in rollouts if row["reward"] is not None)
            rows = pick(args.worst or args.best, rewarded, key=lambda row: row["reward"])
        shown = 0
        for shown, row in enumerate(rows, 1):  # noqa: B007
            show_rollout(row, console)
    if not shown:
        held = f"it holds steps {min(rollouts.steps)} to {max(rollouts.steps)}" if rollouts.steps else "it is empty"
        console.print(Text(f"{rollouts.path}: no rollout for {visible(args.words())}; {held}"))
    if rollouts.broken:
        lines, more = ", ".join(map(str, rollouts.broken[:5])), len(rollouts.broken) - 5
        also = f" and {more} more" if more > 0 else ""
        console.print(Text(f"no rollout, and passed over: line {lines}{also} of {rollouts.path}", style="yellow"))
    return 0 if shown else 1


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # view.py | head ends with head, and says nothing of it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = parse_knobs(sys.argv[1:], View, "Read runs in the terminal.")
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not be able to show everything
    wide = None if sys.stdout.isatty() else 10_000  # a pipe has no edge
    raise SystemExit(view(arguments, Console(highlight=False, width=wide)))
