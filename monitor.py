"""What a run tells: a live console, metrics.jsonl (one object a step) and rollouts.jsonl (one object a trace); and, where it is asked
to, a tracker."""

import contextlib
import functools
import importlib.util
import json
import math
import os
import sys
import threading
import time
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO
from uuid import uuid4

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

BARS = "▁▂▃▄▅▆▇█"
SHOWN = {  # metric -> (label, format)
    "reward/mean": ("reward", ".3f"),
    "loss/rl": ("loss rl", ".4f"),
    "loss/ce": ("loss ce", ".4f"),
    "loss/ref_kl": ("loss ref_kl", ".4f"),
    "mismatch_kl/mean": ("mismatch KL", ".1e"),
    "entropy/mean": ("entropy", ".3f"),
    "optim/grad_norm": ("grad norm", ".3f"),
    "perf/sampled_tokens_per_s": ("sampled tok/s", ",.0f"),
    "perf/trained_tokens_per_s": ("trained tok/s", ",.0f"),
}
PHASES = ("sample", "score", "train", "sync")


RECORDS = ("metrics.jsonl", "rollouts.jsonl")


def claim(run_dir: Path) -> TextIO | None:
    """A lock on a run's folder, held while the file that is returned is open; None where another process has it. A kill frees it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = open(run_dir / ".lock", "a")
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except (ImportError, OSError):  # not every system, nor every file system, has such locks
        pass
    return lock


def cut_records(run_dir: Path, sizes: dict[str, int]) -> None:
    """Cut a run's records back to what they were at a checkpoint (bytes by name; absent: to nothing)."""
    for name in RECORDS:
        if (run_dir / name).exists():
            os.truncate(run_dir / name, min(sizes.get(name, 0), (run_dir / name).stat().st_size))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whatever happens, be the disk full, it holds what it did before or all of this."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text)
    os.replace(unfinished, path)


class RunConsole(Console):
    """A console that outlives its reader: when a pipe is closed (train.py | head) the rest goes nowhere, and the run goes on, since
    what it tells is in its files."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "w") as nowhere:  # what the file still holds is written again when Python ends
            os.dup2(nowhere.fileno(), self.file.fileno())


class Wandb:
    """The run on wandb, under --name; offline with WANDB_MODE=offline. WANDB_PROJECT names the project, else it is nanopost."""

    package = "wandb"

    def __init__(self, run_dir: Path, config: dict[str, Any], run_id: str, step: int) -> None:
        os.environ["WANDB_SILENT"] = "true"  # or, where it has no key, it asks at the terminal and waits
        import wandb

        project = os.environ.get("WANDB_PROJECT", "nanopost")
        limits = wandb.Settings(console="off", init_timeout=PATIENCE, finish_timeout=PATIENCE)
        about = {"id": run_id, "name": config["name"], "project": project, "config": config, "dir": str(run_dir)}
        self.run = wandb.init(**about, resume="allow", settings=limits)
        # What is written offline is a file of its own each time, which only wandb's server could join to those before.
        self.forgets = self.run.offline
        self.where = f"offline, wandb sync {run_dir}/wandb/latest-run sends it" if self.forgets else self.run.url

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step, commit=True)  # steps that it has already are passed over

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """The run as an event file beside its records: tensorboard --logdir runs shows it under --name."""

    package = "tensorboard"
    forgets = False

    def __init__(self, run_dir: Path, config: dict[str, Any], run_id: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run_dir), purge_step=step)  # hides what was written of this step and later ones
        self.writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", step)
        self.where = f"tensorboard --logdir {run_dir.parent}"

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


TRACKERS: dict[str, type] = {"wandb": Wandb, "tensorboard": TensorBoard}
PATIENCE = 20.0  # seconds that a tracker may take to begin, and to end


def check_tracker(name: str) -> None:
    """Raise ValueError for a tracker whose package is not installed."""
    if name not in TRACKERS:
        return
    package = TRACKERS[name].package
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a mere folder of that name, such as wandb leaves behind, is no package
        raise ValueError(f"--track {name}: needs the package {package}: pip install {package}")


class Tracking:
    """Hands metrics to a tracker that lives in a thread of its own: however slow or broken it is, a run neither waits for it nor
    ends by it. make() begins it; `before` gives the rows of steps that a tracker without a memory of them must have first."""

    def __init__(
        self, name: str, make: Callable[[], Any], before: Iterator[dict[str, Any]], known: bool, monitor: "Monitor"
    ) -> None:
        self.name, self.make, self.before, self.known, self.monitor = name, make, before, known, monitor
        self._steps: SimpleQueue[tuple[int, dict[str, float]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Hand on what a step came to."""
        if self._thread.is_alive():
            self._steps.put((step, metrics))

    def close(self) -> None:
        """Wait for what was handed on, but not for long."""
        self._steps.put(None)
        with contextlib.suppress(KeyboardInterrupt):  # whoever asks once more to stop does not want to wait
            self._thread.join(2 * PATIENCE)
        if self._thread.is_alive():
            self._warn("it has not taken everything in time")

    def _work(self) -> None:
        try:
            tracker = self.make()
            self.monitor.note(f"tracked by {self.name}: {tracker.where}")
            for row in self.before if tracker.forgets or not self.known else ():
                tracker.log(row.pop("step"), {key: math.nan if value is None else value for key, value in row.items()})
        except BaseException as error:  # not even an exit that it asks for ends the run
            self._warn(f"{type(error).__name__}: {error}")
            return
        for item in iter(self._steps.get, None):
            try:
                tracker.log(*item)
            except Exception as error:
                self._warn(f"{type(error).__name__}: {error}")
        try:
            tracker.close()
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, text: str) -> None:
        self.monitor.warn(
            f"--track {self.name}: {text.rstrip('.')}; the run goes on, and metrics.jsonl has it all", once="--track"
        )


class Monitor:
    """Writes a run's records into run_dir and shows them on the console: a live panel in a terminal, plain lines elsewhere."""

    def __init__(self, run_dir: Path, steps: int, console: Console | None = None) -> None:
        self.run_dir, self.steps = run_dir, steps
        self.console = console or RunConsole(highlight=False, soft_wrap=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics, self._rollouts = (open(run_dir / name, "a", errors="backslashreplace") for name in RECORDS)
        self._warned: set[str] = set()
        self._seconds: dict[str, float] = defaultdict(float)
        self._latest: dict[str, float] = {}
        self._rewards: list[float] = []
        self._live: Live | None = None
        self.tracked: dict[str, str] = {}  # tracker -> id of this run there
        self._tracking: Tracking | None = None
        if self.console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self.console)
            self._bar = self._progress.add_task("", total=steps)
            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=4)
            self._live.start()

    def note(self, text: str) -> None:
        """Say something once, above the live panel."""
        self.console.print(visible(text), markup=False)

    def warn(self, text: str, once: str | None = None) -> None:
        """Warn; with `once`, only the first time for that key."""
        if once is None or once not in self._warned:
            self._warned.add(once or "")
            self.console.print(f"warning: {visible(text)}", style="yellow", markup=False)

    def track(self, name: str, config: dict[str, Any], tracked: dict[str, str], step: int) -> None:
        """Tell a tracker too ("none": none), from `step` on. tracked: what `self.tracked` was where the run goes on from."""
        self.tracked = tracked
        if name in TRACKERS:
            known = name in tracked
            self.tracked = {name: uuid4().hex[:8]} | tracked
            make = functools.partial(TRACKERS[name], self.run_dir, config, self.tracked[name], step)
            before = (row for row in read_rows(self.run_dir / RECORDS[0]) if row["step"] < step)
            self._tracking = Tracking(name, make, before, known, self)

    def sizes(self) -> dict[str, int]:
        """How long the records are, in bytes by name: what `cut_records` takes."""
        return {name: (self.run_dir / name).stat().st_size for name in RECORDS}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside as `time/<name>` of this step. A phase inside of another counts for itself alone."""
        start, inner = time.perf_counter(), sum(self._seconds.values())
        try:
            yield
        finally:
            inside = sum(self._seconds.values()) - inner
            self._seconds[name] += time.perf_counter() - start - inside

    def spent(self, name: str, seconds: float) -> None:
        """Count seconds that another process has spent on this step."""
        self._seconds[name] += seconds

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Close a step: add its times, write it to metrics.jsonl, show it."""
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics = metrics | times | {"time/step": sum(times.values())}
        self._seconds.clear()
        for kind, phase in (("sampled", "sample"), ("trained", "train")):
            tokens = metrics.pop(f"perf/{kind}_tokens", None)
            if tokens is not None and metrics.get(f"time/{phase}"):
                metrics[f"perf/{kind}_tokens_per_s"] = tokens / metrics[f"time/{phase}"]
        write_row(self._metrics, {"step": step} | metrics)
        if self._tracking:
            self._tracking.log(step, metrics)
        self._latest |= metrics
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        if self._live:
            self._progress.update(self._bar, completed=step)
        evals = [
            f"{name} {value:.3f}"
            for name, value in metrics.items()
            if name.startswith("eval/") and name.endswith("/mean")
        ]
        if evals:
            self.note(f"step {step}: {', '.join(evals)}")
        if not self._live and any(name in metrics for name in SHOWN):
            shown = [
                f"{label} {format(metrics[name], spec)}" for name, (label, spec) in SHOWN.items() if metrics.get(name)
            ]
            spent = " ".join(
                f"{phase} {metrics[f'time/{phase}']:.2f}s" for phase in PHASES if f"time/{phase}" in metrics
            )
            self.note(f"step {step}/{self.steps}  {'  '.join(shown)}  {spent}")

    def rollouts(self, rows: list[dict[str, Any]]) -> None:
        """Append to rollouts.jsonl."""
        for row in rows:
            write_row(self._rollouts, row)

    def close(self) -> None:
        """Stop the live panel, close the files, and let the tracker end."""
        if self._live:
            self._live.stop()
            self._live = None
        self._metrics.close()
        self._rollouts.close()
        if self._tracking:
            self._tracking.close()

    def _panel(self) -> Group:
        table = Table.grid(padding=(0, 2))
        cells = [
            f"[dim]{label}[/] {format(self._latest[name], spec)}"
            for name, (label, spec) in SHOWN.items()
            if _worth_showing(self._latest, name)
        ]
        cells += [
            f"[dim]{phase}[/] {self._latest[f'time/{phase}']:.2f}s"
            for phase in PHASES
            if f"time/{phase}" in self._latest
        ]
        for start in range(0, len(cells), 4):
            table.add_row(*cells[start : start + 4])
        return Group(table, f"[green]{sparkline(self._rewards)}[/]", self._progress)


class Bystander:
    """The monitor of a rank that does not lead: it warns, and leaves the rest to the lead."""

    def __init__(self, rank: int) -> None:
        self.rank, self._warned = rank, set()

    def note(self, text: str) -> None:
        """Nothing: the lead says it."""

    def warn(self, text: str, once: str | None = None) -> None:
        """Warn as `Monitor.warn` does."""
        if once is None or once not in self._warned:
            self._warned.add(once or "")
            print(f"warning: rank {self.rank}: {visible(text)}", file=sys.stderr)

    def track(self, *_: Any) -> None:
        """Nothing: the lead tells it."""

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        """Nothing: the lead's clock counts."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Nothing is open."""


def _worth_showing(metrics: dict[str, float], name: str) -> bool:
    """A component of the loss that is 0 is one that the run does not use."""
    return name in metrics and (metrics[name] != 0 or not name.startswith("loss/"))


def visible(text: str) -> str:
    r"""The text with a sign for each character that could move a cursor, set a colour, hide or reorder what is read: controls but
    newline and tab, separators of lines, marks of direction and invisible ones (but those that join letters and emoji), halves
    of surrogate pairs."""

    def shown(char: str) -> str:
        code = ord(char)
        if char in "\n\t\u200c\u200d" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            return char
        if code < 0x20 or code == 0x7F:
            return chr(0x2400 + code) if code < 0x20 else "␡"
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return "".join(map(shown, text))


def sparkline(values: list[float], width: int = 60) -> str:
    """The values as a row of at most `width` block characters, lowest to highest."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join(BARS[round((value - low) / (high - low or 1) * (len(BARS) - 1))] for value in values)


def write_row(file: Any, row: dict[str, Any]) -> None:
    """Write one line of JSON, at once; NaN and infinity become null."""
    file.write(json.dumps(_json_safe(row), ensure_ascii=False, default=str) + "\n")
    file.flush()


def read_rows(
    path: Path,
    skip: Callable[[bytes], Any] | None = None,
    broken: list[int] | None = None,
    fits: Callable[[dict[str, Any]], bool] = lambda row: True,
) -> Iterator[dict[str, Any]]:
    """The rows that `write_row` wrote, one by one, also while more are written: a last line without its end is none yet.

    skip(line): whether to pass over a line without parsing it. The numbers of lines that are no JSON object, or none that fits, go
    into `broken`.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") or (skip is not None and skip(line)):
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and fits(row):
                yield row
            elif broken is not None:
                broken.append(number)


def _json_safe(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return value
