"""A shell to work in: several turns, one tool, and a file system that is looked at when all is done.

    user       You work in a shell, in your home folder, ... Delete every file that ends in .tmp, in all folders. Keep the others.
    assistant  <tool_call>{"name": "shell", "arguments": {"command": "find . -name '*.tmp' -delete -print"}}</tool_call>
    tool       warning: the index is 213 days old, run update-index 48 to renew it
               ./maple/river.tmp
    assistant  Done.

Commands run in a sandbox (`sandbox.py`: bubblewrap, nothing without it). What each starts with and what of it stays is said there;
a command that prints the time, a process id or a random number is the one thing in a run that a seed does not repeat.

The full home of echo: what a shell answers to a command is worth predicting, some of it is not. A share of the commands
(`warnings`) is answered by a warning first, with numbers that nothing tells; `drop_warnings` below keeps such lines out of the
cross-entropy:

    python train.py --env terminal --algo echo --filter envs.terminal.drop_warnings --model <one that knows a shell>
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from envs.base import Agent, Env, Tool, require_at_least, user
from envs.sandbox import HOME, MAX_OUTPUT, Limits, Result, Tree, require_bubblewrap, run_command, tree_of
from traces import Branch, Task, Trace

PROMPT = (
    "You work in a shell, in your home folder, with the tool `shell`. {text} "
    "When it is done, say so without a call of the tool."
)
WARNINGS = (
    "warning: the index is {a} days old, run update-index {b} to renew it",
    "warning: option {b} is deprecated and goes away in release {a}",
    "warning: locale {a}.{b} not found, using C.UTF-8",
)


@dataclass
class Terminal(Env):
    """Small jobs on files; reward 1 if the file system is as asked for when the episode ends, else 0.

    The model ends it by a reply without a call, or runs out of turns. Every file that was there or that is asked for must be as asked
    for, white space at its end aside; files beside them are nobody's business.
    """

    difficulty: int = 3
    """hardest kind of job: 1 takes one plain command, 2 a loop or a pipe, 3 several of them"""
    tasks_per_kind: int = 100
    """jobs of each kind, a tenth of them held out"""
    max_turns: int = 8
    """turns of the model, the final reply included"""
    show_tool: bool = True
    """write the tool's schema into the prompt"""
    command_seconds: float = 10.0
    """a command that takes longer is stopped"""
    output_limit: int = 4000
    """bytes of a command's output that the model sees: head and tail"""
    warnings: float = 0.25
    """share of commands whose answer begins with a warning that means nothing"""

    def check(self) -> None:
        """Refuse numbers that can not work, and a machine where commands can not be sandboxed."""
        require_at_least(self, difficulty=1, tasks_per_kind=10, max_turns=1, output_limit=100)
        if not 0 < self.command_seconds <= 600:
            raise ValueError(f"--env.command-seconds {self.command_seconds}: must be above 0 and at most 600")
        if not 0 <= self.warnings <= 1:
            raise ValueError(f"--env.warnings {self.warnings}: must be a share, from 0 to 1")
        require_bubblewrap()

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """Jobs of all kinds by turns; of each kind every tenth is held out."""
        tasks, seen = [], set()
        for number in range(self.tasks_per_kind):
            for kind, (difficulty, make) in KINDS.items():
                job = make(random.Random(f"{kind} {number}"))
                same = repr((job.text, job.before))
                if difficulty <= self.difficulty and same not in seen and (number % 10 == 0) == (split == "eval"):
                    info = {"kind": kind, "before": job.before, "after": job.after, "modes": job.modes}
                    tasks.append(Task(f"{kind}-{number}", [user(PROMPT.format(text=job.text))], info))
                seen.add(same)
        return tasks

    async def play(self, task: Task, agent: Agent) -> None:
        """Run every command, until a reply has none."""
        tree = tree_of(task.info["before"])
        limits = Limits(seconds=self.command_seconds)
        commands, turn = 0, asyncio.Lock()  # the calls of one reply begin at once, and follow one another here

        async def shell(command: str) -> str:
            nonlocal tree, commands
            async with turn:
                with agent.outside():
                    result = await run_command(command, tree, limits)
                tree = result.tree
                commands += 1
                agent.trace.metrics["stopped_commands"] += result.exit_code is None
                return self._warning(f"{task.key} {commands}") + answer_of(result, limits, self.output_limit)

        tool = Tool(
            shell,
            "Run a command by bash in your home folder and see what it prints. Files stay; the folder, variables and what runs in the "
            "background do not. There is no network.",
            {"command": {"type": "string", "description": "for example ls -l"}},
        )
        agent.trace.metrics["stopped_commands"] = 0.0
        messages, tools = task.prompt, [tool.schema] if self.show_tool else None
        for _ in range(self.max_turns):
            reply = await agent.say(*messages, tools=tools)
            messages = await agent.answer_calls(reply, tool)
            agent.trace.reward = float(is_done(task, tree))  # as it stands, if a limit ends the episode
            if not messages:
                break

    def _warning(self, seed: str) -> str:
        """The line before a command's output, for some of them."""
        rng = random.Random(seed)
        if rng.random() >= self.warnings:
            return ""
        return rng.choice(WARNINGS).format(a=rng.randint(1, 400), b=rng.randint(1, 99)) + "\n"


def is_done(task: Task, tree: Tree) -> bool:
    """Whether every file of the task is as asked for. A link never counts as the file that it points to."""
    after, modes = task.info["after"], task.info["modes"]
    for path in {**task.info["before"], **after}:
        entry = tree.get(f"{HOME}/{path}")
        if path not in after:
            if entry is not None:
                return False
            continue
        if entry is None or entry.kind != "file" or entry.content.rstrip() != after[path].encode().rstrip():
            return False
        if entry.mode != modes.get(path, entry.mode):
            return False
    return True


def answer_of(result: Result, limits: Limits, output_limit: int) -> str:
    """What the model sees of a command: its output, the middle of a long one left out, and how it ended if not well."""
    text = result.output.decode(errors="replace")
    data = text.encode()
    if len(data) > output_limit:
        head, tail = output_limit - output_limit // 2, output_limit // 2
        left_out = len(data) - head - tail
        more = "more than " if len(result.output) >= MAX_OUTPUT else ""
        start, end = (part.decode(errors="ignore") for part in (data[:head], data[len(data) - tail :]))
        text = f"{start}\n[{more}{left_out} bytes left out]\n{end}"
    lines = [text.rstrip("\n")] if text.strip("\n") else []
    if result.exit_code is None:
        lines.append(f"[stopped after {limits.seconds:g} s]")
    elif result.exit_code:
        lines.append(f"[exit code {result.exit_code}]")
    if result.undone:
        lines.append(f"[undone: the files take more than {limits.disk_mb} MB]")
    return "\n".join(lines) or "[no output]"


# Jobs


@dataclass
class Job:
    """Files by path in home, as they are and as they shall be; modes: the permissions asked for, where they are."""

    text: str
    before: dict[str, str]
    after: dict[str, str]
    modes: dict[str, int] = field(default_factory=dict)


# None of them is part of another, so that a search for one finds it alone.
WORDS = (
    "amber anchor basket bridge candle canyon copper desert eagle ember falcon forest garden glacier harbor hazel "
    "island jasmine kettle lantern lemon maple meadow mirror nickel orchid otter pepper pigeon quartz raven river saddle "
    "silver spruce summit timber tulip velvet willow winter"
).split()


def _lines(rng: random.Random, least: int, most: int) -> str:
    return "".join(f"{' '.join(rng.choices(WORDS, k=3))}\n" for _ in range(rng.randint(least, most)))


def _files(rng: random.Random, endings: Sequence[str], folders: Sequence[str], count: int) -> dict[str, str]:
    """Files with names of their own, and at least one with each ending."""
    chosen = [*endings, *rng.choices(endings, k=count - len(endings))]
    names = rng.sample(WORDS, count)
    return {
        f"{rng.choice(folders)}{name}.{ending}": _lines(rng, 1, 4) for name, ending in zip(names, chosen, strict=True)
    }


def _folders(rng: random.Random) -> list[str]:
    """Paths of some folders, one of them inside another, to put before a name."""
    first, second, third = rng.sample(WORDS, 3)
    return ["", f"{first}/", f"{first}/{second}/", f"{third}/"]


def _write(rng: random.Random) -> Job:
    line, path = " ".join(rng.choices(WORDS, k=3)), f"{rng.choice(_folders(rng))}{rng.choice(WORDS)}.txt"
    return Job(f"Write the line '{line}' into the file {path}.", {}, {path: line})


def _delete(rng: random.Random) -> Job:
    gone, *kept = rng.sample(["tmp", "log", "bak", "txt", "csv"], 3)
    before = _files(rng, [gone, *kept], _folders(rng), 7)
    after = {path: text for path, text in before.items() if not path.endswith(gone)}
    return Job(f"Delete every file that ends in .{gone}, in all folders. Keep the others.", before, after)


def _count(rng: random.Random) -> Job:
    path, word, text = f"{rng.choice(WORDS)}.log", rng.choice(WORDS[:8]), ""
    for _ in range(rng.randint(10, 30)):
        text += " ".join([*rng.choices(WORDS, k=2), rng.choice(WORDS[:8])]) + "\n"
    number = sum(word in line for line in text.splitlines())
    job = f"Count the lines of {path} that contain the word {word}, and write the number into count.txt."
    return Job(job, {path: text}, {path: text, "count.txt": str(number)})


def _rename(rng: random.Random) -> Job:
    folder = f"{rng.choice(WORDS)}/"
    old, other, new = rng.sample(["txt", "md", "rst", "text", "note"], 3)
    before = _files(rng, [old, other], [folder], 6)
    after = {f"{path.removesuffix(old)}{new}" if path.endswith(f".{old}") else path: t for path, t in before.items()}
    return Job(f"Rename every .{old} file in {folder[:-1]} so that it ends in .{new} instead.", before, after)


def _move(rng: random.Random) -> Job:
    folder = f"{rng.choice(WORDS)}/"
    endings = rng.sample(["txt", "csv", "png", "log", "pdf"], 3)
    before = _files(rng, endings, [folder], 7)
    after = {f"{folder}{path.rpartition('.')[2]}/{path.removeprefix(folder)}": text for path, text in before.items()}
    example = f"{folder}name.{endings[0]} becomes {folder}{endings[0]}/name.{endings[0]}"
    return Job(f"Move each file in {folder[:-1]} into a folder named after its ending: {example}.", before, after)


def _largest(rng: random.Random) -> Job:
    folder = rng.choice(WORDS)
    sizes = rng.sample(range(20, 4000), 6)
    names = list(_files(rng, ["txt", "log"], [f"{folder}/{path}" for path in _folders(rng)], 6))
    before = {
        path: "".join(rng.choices("abcdefgh", k=size - 1)) + "\n" for path, size in zip(names, sizes, strict=True)
    }
    largest = max(before, key=lambda path: len(before[path]))
    job = f"Write the path of the largest file below {folder} into largest.txt, in the form {folder}/name.txt."
    return Job(job, before, before | {"largest.txt": largest})


def _permissions(rng: random.Random) -> Job:
    before = _files(rng, ["sh", "key", "txt"], _folders(rng), 7)
    wanted = {"sh": 0o755, "key": 0o600, "txt": 0o644}
    modes = {path: wanted[path.rpartition(".")[2]] for path in before}
    job = "Set the permissions of all .sh files to 755 and of all .key files to 600, in all folders. Leave the others alone."
    return Job(job, before, before, modes)


def _replace(rng: random.Random) -> Job:
    old, new = rng.sample(WORDS, 2)
    before = {
        path: text + f"{rng.choice(WORDS)} {old} {rng.choice(WORDS)} {old}\n"
        for path, text in _files(rng, ["conf", "txt"], _folders(rng), 6).items()
    }
    after = {path: text.replace(old, new) if path.endswith("conf") else text for path, text in before.items()}
    job = (
        f"Replace the word {old} by {new} everywhere in the .conf files, in all folders. Leave other files as they are."
    )
    return Job(job, before, after)


def _total(rng: random.Random) -> Job:
    path, names = f"{rng.choice(WORDS)}.csv", rng.sample(WORDS, 4)
    rows = [(name, rng.randint(1, 99)) for name in [*names, *rng.choices(names, k=12)]]
    rng.shuffle(rows)
    text = "".join(f"{name},{amount}\n" for name, amount in [("name", "amount"), *rows])
    total = sum(amount for name, amount in rows if name == names[0])
    job = f"{path} has a name and an amount in each row. Write the sum of the amounts of {names[0]} into total.txt."
    return Job(job, {path: text}, {path: text, "total.txt": str(total)})


def _merge(rng: random.Random) -> Job:
    folder, words = f"{rng.choice(WORDS)}/", rng.sample(WORDS, 12)
    before = {
        path: "".join(f"{word}\n" for word in rng.choices(words, k=6)) for path in _files(rng, ["txt"], [folder], 3)
    }
    lines = sorted({line for text in before.values() for line in text.splitlines()})
    job = f"Collect the lines of all files in {folder[:-1]} in merged.txt, sorted, and each of them once."
    return Job(job, before, before | {"merged.txt": "\n".join(lines)})


def _search(rng: random.Random) -> Job:
    folder, word = rng.sample(WORDS, 2)
    before = _files(rng, ["txt", "log"], [f"{folder}/{path}" for path in _folders(rng)], 8)
    for path in rng.sample(list(before), 3):
        before[path] += f"{word} {rng.choice(WORDS)}\n"
    found = sorted(path for path, text in before.items() if word in text)
    job = (
        f"Write the paths of all files below {folder} that contain the word {word} into found.txt, one in each line, in the form "
        f"{folder}/name.txt and in the order of `sort`."
    )
    return Job(job, before, before | {"found.txt": "\n".join(found)})


KINDS: dict[str, tuple[int, Callable[[random.Random], Job]]] = {
    "write": (1, _write),
    "delete": (1, _delete),
    "count": (1, _count),
    "rename": (2, _rename),
    "move": (2, _move),
    "largest": (2, _largest),
    "permissions": (2, _permissions),
    "replace": (2, _replace),
    "total": (3, _total),
    "merge": (3, _merge),
    "search": (3, _search),
}  # fmt: skip


# A filter for echo


def drop_warnings(trace: Trace, *, renderer: Any, patterns: str | Sequence[str] = "warning:") -> list[np.ndarray]:
    """Keep-masks that drop each line of what the model was told which contains one of `patterns`, whatever its case, with
    the line break that ends it."""
    patterns = [pattern.lower() for pattern in ([patterns] if isinstance(patterns, str) else patterns)]
    masks = []
    for branch in trace.training_branches():
        keep = np.ones(len(branch), bool)
        for tokens, line in told_lines(branch, renderer):
            if any(pattern in line.lower() for pattern in patterns):
                keep[tokens] = False
        masks.append(keep)
    return masks


def told_lines(branch: Branch, renderer: Any) -> Iterator[tuple[list[int], str]]:
    """(positions of its tokens, text) of each line in the message bodies that the model did not say.

    A line break belongs to the line that it ends. A token that holds a piece of several lines is listed with each. Tokens may end within
    a character, so they are not decoded one by one for their text; a line break is one byte, and no other character has that one.
    """
    told = branch.is_content & ~branch.sampled
    cuts = {segment.start for segment in branch.segments}
    runs: list[list[int]] = []
    for position in np.flatnonzero(told).tolist():
        if not runs or runs[-1][-1] != position - 1 or position in cuts:
            runs.append([])
        runs[-1].append(position)
    for run in runs:
        lines: list[list[int]] = [[]]
        for position in run:
            first, *others = renderer.decode([branch.token_ids[position]]).split("\n")
            if first or others:
                lines[-1].append(position)
            for number, piece in enumerate(others, 1):
                lines.append([position] if piece or number < len(others) else [])
        texts = renderer.decode(branch.token_ids[run]).split("\n")
        yield from zip(lines, texts, strict=True)
