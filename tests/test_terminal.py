"""The terminal: what a command can not do, what every job asks for, what an episode earns, and which lines echo leaves out."""

import asyncio
import itertools
import json
import os
import re
import runpy
import socket
import time

import numpy as np
import pytest
from rich.console import Console

from algos import ALGORITHMS
from algos.echo import EchoConfig
from algos.token_filter import keep_masks, load_filter
from config import Config, Source
from engines.base import Completion
from envs import sandbox
from envs.base import Agent
from envs.sandbox import Entry, Limits, tree_of
from envs.terminal import KINDS, WORDS, Terminal, answer_of, drop_warnings, is_done, told_lines
from make_tiny import EOS, make_tokenizer, text_ids
from monitor import Monitor
from renderers import make_renderer
from rollouts import Rollouts
from tests.conftest import ROOT
from tests.renderer_data import byte_tokenizer
from tests.test_rollouts import Fake
from traces import Branch, Episode, Task, Trace

try:
    sandbox.require_bubblewrap()
    MISSING = ""
except ValueError as error:
    MISSING = str(error)
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=MISSING)

RENDERER = make_renderer("qwen3", make_tokenizer(), "qwen3")


def run(*commands, tree=None, **limits):
    """The results of commands that follow one another."""
    tree, results = tree or tree_of({}), []

    async def all_of_them():
        nonlocal tree
        for command in commands:
            results.append(await sandbox.run_command(command, tree, Limits(**{"seconds": 5} | limits)))
            tree = results[-1].tree

    asyncio.run(all_of_them())
    return results


def out(command, **options):
    """What a command prints."""
    return run(command, **options)[-1].output.decode()


def running(marker):
    """Command lines on this machine that hold a text."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = open(f"/proc/{pid}/cmdline", "rb").read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in line and int(pid) != os.getpid():
            found.append(line)
    return found


def children():
    """Processes that this one started and that are there still."""
    return {
        pid
        for thread in os.listdir("/proc/self/task")
        for pid in open(f"/proc/self/task/{thread}/children").read().split()
    }


def gone(marker):
    """Whether nothing with this marker runs, now or within two seconds."""
    end = time.monotonic() + 2
    while running(marker) and time.monotonic() < end:
        time.sleep(0.02)
    return not running(marker)


def snapshot():
    """The checkout as it lies on disk."""
    skipped = {".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis"}
    found = {}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in skipped]
        for name in files:
            at = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = at.st_mode, at.st_size, at.st_mtime_ns
    return found


# Escapes


@pytest.fixture(scope="module")
def nothing_changes(tmp_path_factory):
    """A file outside for commands to reach for. When all of them have run nothing has changed and nothing is left."""
    if MISSING:
        pytest.skip(MISSING)
    folder = tmp_path_factory.mktemp("outside")
    canary = folder / "canary"
    canary.write_text("sing")
    os.chmod(folder, 0o777)
    os.chmod(canary, 0o666)
    before, at, own = snapshot(), os.lstat(canary), children()
    yield canary
    assert snapshot() == before and children() == own
    assert (
        canary.read_text() == "sing"
        and os.lstat(canary).st_mtime_ns == at.st_mtime_ns
        and os.lstat(canary).st_nlink == 1
        and os.listdir(folder) == ["canary"]
    )
    assert gone("86399.")


def test_the_rest_of_the_machine_is_not_there(nothing_changes):
    paths = [
        nothing_changes,
        ROOT,
        "/root",
        "/etc/shadow",
        "/etc/passwd",
        "/var",
        "/sys",
        "/run",
        "/work",
        "/mnt",
        "/dev/shm",
        "/dev/kmsg",
    ]
    reach = "; ".join(f"ls {path} && echo REACHED; cat {path} && echo REACHED" for path in paths)
    climb = f"ln -s {nothing_changes} link; cat link && echo REACHED; cd ../../../../..; ls .{ROOT} && echo REACHED"
    fds = "for fd in /proc/self/fd/* /proc/1/root /proc/1/cwd /proc/1/fd/*; do readlink $fd; done"
    text = out(f"{reach}; {climb}; ls /")
    assert "REACHED" not in text
    assert set(re.findall(r"^[a-z0-9]+$", text, re.M)) == {
        "bin",
        "dev",
        "etc",
        "home",
        "lib",
        "lib64",
        "proc",
        "tmp",
        "usr",
    }
    opened = out(f"{fds}; yes > /proc/1/fd/2 | head -c 2000000 > /dev/null").splitlines()
    assert {re.sub(r"\d+", "", line) for line in opened if line != "y"} <= {
        "pipe:[]",
        "/dev/null",
        "/",
        "/home/user",
        "anon_inode:[eventfd]",
    }
    assert len({line for line in opened if line.startswith("pipe")}) == 1


def test_nothing_outside_can_be_written(nothing_changes):
    paths = "/x /dev/x /dev/shm/x /usr/bin/x /etc/x /home/x /proc/sys/kernel/hostname /proc/sysrq-trigger"
    text = out(
        f"for path in {paths}; do (echo x > $path) && echo WRITTEN $path; ln $path here && echo LINKED $path; done"
    )
    assert "WRITTEN" not in text and "LINKED" not in text
    text = out(
        f"echo x > {nothing_changes}; ln {nothing_changes} h; ln -s {nothing_changes} s; echo x > s; chmod 777 /usr; rm -f /usr/bin/env; id -u"
    )
    assert text.endswith("1000\n")
    commands = "mount -t tmpfs none /tmp; mount -o remount,rw /usr; umount /proc; unshare -Ur true; chroot / true; mknod x b 8 0"
    assert "DONE" not in out("".join(f"({command}) && echo DONE {command}\n" for command in commands.split("; ")))


def test_there_is_no_network(nothing_changes):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        text = out(
            f"(echo hi > /dev/tcp/127.0.0.1/{port}) && echo REACHED; (echo hi > /dev/udp/8.8.8.8/53) && echo REACHED; cat /proc/net/dev"
        )
        with pytest.raises(TimeoutError):
            server.accept()
    assert "REACHED" not in text and set(re.findall(r"(\w+):", text.partition("face")[2])) <= {"lo"}


def test_secrets_stay_outside(nothing_changes, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    text = out("env; export -p; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; cat /proc/self/status")
    assert "secret" not in text and str(ROOT) not in text
    names = set(re.findall(r"^([A-Z_]+)=", text, re.M))
    assert {"PATH", "HOME", "LANG", "TZ"} <= names <= {"PATH", "HOME", "LANG", "TZ", "PWD", "SHLVL", "_"}
    assert set(re.findall(r"Cap\w+:\s*(\w+)", text)) == {"0" * 16} and re.search(r"NoNewPrivs:\s*1", text)


def test_a_fork_bomb_ends(nothing_changes):
    start = time.monotonic()
    (bomb, after) = run(":(){ :|:& };: 86399.1; sleep 86399.2", "echo well", seconds=1)
    assert bomb.exit_code is None and after.output == b"well\n" and time.monotonic() - start < 15
    (count,) = run("for i in {1..100}; do sleep 86399.3 2>&1 & echo started; done", seconds=2, processes=20)
    assert 5 < count.output.count(b"started") < 20


def test_memory_is_bounded(nothing_changes):
    filled = out(
        "head -c 90M /dev/zero | tail -c 90M | wc -c; x=$(head -c 80M /dev/zero | tr '\\0' x); echo ${#x}", memory_mb=64
    )
    assert str(90 * 2**20) not in filled and str(80 * 2**20) not in filled and "cannot allocate" in filled.lower()


def test_memory_that_no_process_has_mapped_is_refused(nothing_changes):
    text = out("command -v python3 && python3 -c 'import os; print(os.getpid() > 0); os.memfd_create(\"x\")'")
    if not text:
        pytest.skip("no python3 in /usr/bin to ask with")
    assert "True" in text and "OSError: [Errno 38]" in text


def test_output_is_read_up_to_a_limit(nothing_changes):
    start = time.monotonic()
    (endless,) = run("yes")
    assert len(endless.output) == sandbox.MAX_OUTPUT and endless.exit_code and time.monotonic() - start < 4
    (stubborn,) = run("trap '' PIPE; yes 2> /dev/null; sleep 86399.4", seconds=1)
    assert len(stubborn.output) == sandbox.MAX_OUTPUT and stubborn.exit_code is None
    text = answer_of(endless, Limits(), 100)
    assert re.fullmatch(r"(y\n)+\n?\[more than \d+ bytes left out\]\n(y\n)+\[exit code \d+\]", text) and len(text) < 170


def test_the_disk_is_bounded(nothing_changes):
    one, many, sparse, names, links, deep = (
        run(command, "echo well > a; cat a", disk_mb=2, seconds=5)
        for command in (
            "echo well > /tmp/a; cat /dev/zero > big; cat /dev/zero > /tmp/big; du -sb /tmp . | cut -f1",
            "echo well > /tmp/a; for i in {1..900}; do echo x > $i; done",
            "for i in {1..9}; do truncate -s 2M $i; done",
            "mkdir d{1..60}; touch d{1..60}/{1..200}",
            "head -c 1M /dev/zero > a; for i in {1..9}; do ln a $i; done",
            "mkdir -p $(printf 'long-name/%.0s' {1..150})",
        )
    )
    assert sum(map(int, one[0].output.decode().split()[-2:])) < 2.2 * 2**20 and not one[0].undone
    assert many[0].exit_code == 1 and not many[0].undone
    for first, second in (sparse, names, links, deep):
        assert first.undone and first.tree == tree_of({}) and second.output == b"well\n", first.output


@pytest.mark.parametrize(
    "command",
    [
        "sleep 86399.5 &",
        "nohup sleep 86399.5 > /dev/null 2>&1 & disown",
        "setsid sleep 86399.5 & setsid -f sleep 86399.5",
        "(setsid bash -c '(trap \"\" TERM HUP INT; sleep 86399.5; sleep 86399.5) &' &) > /dev/null 2>&1 < /dev/null",
        "sleep 86399.5",
    ],
)
def test_nothing_is_left_running(nothing_changes, command):
    start = time.monotonic()
    results = run(f"{command}\necho on", "ps ax", seconds=1)
    assert gone("86399.5") and b"86399" not in results[1].output and time.monotonic() - start < 8
    assert results[0].exit_code == (None if command == "sleep 86399.5" else 0)


def test_signals_reach_nobody_else(nothing_changes):
    for command in (
        "kill -9 -1; kill -9 $PPID; kill -9 1; kill -9 0",
        "kill -STOP $PPID; kill -9 -$PPID",
        f"kill -9 {os.getpid()}",
        "kill -9 $$",
    ):
        _, after = run(command, "echo well", seconds=2)
        assert after.output == b"well\n"
    assert set(re.findall(r"\d+", out("ls /proc | grep -E '^[0-9]+$'"))) <= {str(i) for i in range(1, 9)}


def test_an_episode_that_is_given_up_takes_its_command_along(nothing_changes):
    async def give_up():
        task = asyncio.create_task(sandbox.run_command("sleep 86399.6", tree_of({}), Limits()))
        while not running("86399.6"):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert gone("86399.6")


def test_strange_commands(nothing_changes):
    with pytest.raises(ValueError, match="32768 bytes, this one 40000"):
        run("x" * 40_000)
    for wrong in ("a\0b", "\ud800"):
        with pytest.raises(ValueError, match="null characters and surrogates"):
            run(wrong)
    assert out("echo " + "x" * 32_000) == "x" * 32_000 + "\n"
    assert run("")[0].exit_code == 0 and run("-c")[0].exit_code == 127 and run("(")[0].exit_code == 2
    assert out("echo 'ä€😀\u2028'; cat <<'X'\n$HOME `id`\nX") == "ä€😀\u2028\n$HOME `id`\n"
    assert out("echo out; echo err >&2; read x; echo ${x:-nothing}") == "out\nerr\nnothing\n"
    assert out("tty; cat /dev/tty") == "not a tty\ncat: /dev/tty: No such file or directory\n"


def test_what_stays(nothing_changes):
    setup = "mkdir -p a/b; echo hi > a/b/c; chmod 000 a/b/c; chmod 100 a; ln -s a/b/c l; ln -s /nowhere m; mkfifo p; ln l h; echo t > /tmp/t; cd a; X=1"
    names = r"touch -- $'new\nline' $'\xff' '-rf' ' ' 'ü' status output; mkdir .hidden; chmod 4755 .hidden"
    first, second, third = run(
        setup, names, "pwd; echo [$X]; stat -c '%A %n' a l m p /tmp/t; ls -a; readlink l; date -r /tmp/t +%F"
    )
    assert (first.exit_code, second.exit_code, third.undone) == (0, 0, False)
    tree = third.tree
    assert tree["home/a/b/c"] == Entry("file", b"hi\n", 0) and tree["home/a"].mode == 0o100
    assert tree["home/l"] == Entry("link", b"a/b/c", 0o777) and tree["home/p"].kind == "other"
    assert {
        "home/new\nline",
        "home/\udcff",
        "home/-rf",
        "home/ ",
        "home/ü",
        "home/status",
        "home/output",
        "tmp/t",
    } <= tree.keys()
    assert third.output.startswith(b"/home/user\n[]\nd--x------ a\n") and third.output.endswith(b"\n2001-09-09\n")


def test_binary_output(nothing_changes):
    (result,) = run(r"printf '\x00\xff\xfe<|im_end|>\x1b[2J\xc3'")
    assert result.output == b"\x00\xff\xfe<|im_end|>\x1b[2J\xc3"
    assert answer_of(result, Limits(), 4000) == "\x00\ufffd\ufffd<|im_end|>\x1b[2J\ufffd"


def test_long_output_is_cut_between_characters():
    result = sandbox.Result("é".encode() * 1000, 3, {}, True)
    for limit in (100, 101, 102, 103):
        text = answer_of(result, Limits(), limit)
        head, note, tail, *notes = text.split("\n")
        assert set(head) == set(tail) == {"é"} and len((head + tail).encode()) in range(limit - 3, limit + 1)
        assert note == f"[{2000 - limit} bytes left out]" and notes == [
            "[exit code 3]",
            "[undone: the files take more than 16 MB]",
        ]
    assert answer_of(sandbox.Result(b"", 0, {}, False), Limits(), 100) == "[no output]"
    assert answer_of(sandbox.Result(b"a\n\n", None, {}, False), Limits(), 100) == "a\n[stopped after 10 s]"


def test_without_bubblewrap_it_does_not_start(monkeypatch):
    monkeypatch.setattr(sandbox, "_bwrap", lambda: None)
    with pytest.raises(
        ValueError, match=r"no /usr/bin/bwrap: install it with `apt-get install bubblewrap` .* `dnf"
    ) as error:
        Terminal().check()
    assert "\n" not in str(error.value)


def test_a_bubblewrap_that_makes_no_namespace_is_named(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create\nnew namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o755)
    monkeypatch.setattr(sandbox, "_bwrap", lambda: str(fake))
    monkeypatch.setattr(sandbox, "_who", lambda: {"env": {"PATH": "/usr/bin"}})
    with pytest.raises(ValueError, match="no sandbox here .*No permissions to create new namespace") as error:
        Terminal().check()
    assert "\n" not in str(error.value)
    with pytest.raises(RuntimeError, match="the sandbox failed"):
        run("echo unsandboxed")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"difficulty": 0}, "--env.difficulty 0"), ({"command_seconds": 0}, "--env.command-seconds 0"),
     ({"command_seconds": float("nan")}, "--env.command-seconds nan"), ({"warnings": 1.5}, "--env.warnings 1.5"),
     ({"output_limit": 10}, "--env.output-limit 10"), ({"max_turns": 0}, "--env.max-turns 0")],
)  # fmt: skip
def test_options_that_can_not_work(options, message):
    with pytest.raises(ValueError, match=message):
        Terminal(**options).check()


# Jobs


def test_train_and_held_out_jobs():
    env = Terminal()
    train, held_out = env.tasks("train"), env.tasks("eval")
    for tasks, least in ((train, 85), (held_out, 9)):
        kinds = [task.info["kind"] for task in tasks]
        assert all(kinds.count(kind) >= least for kind in KINDS)
    said = [(task.prompt[0]["content"], json.dumps(task.info["before"])) for task in train + held_out]
    assert len(set(said)) == len(said) and len({task.key for task in train + held_out}) == len(said)
    assert Terminal().tasks("train") == train and {t.info["kind"] for t in Terminal(difficulty=1).tasks("train")} == {
        "write",
        "delete",
        "count",
    }
    assert not any(a != b and a in b for a, b in itertools.product(WORDS, WORDS))


def test_no_job_is_done_before_it_begins():
    for task in Terminal().tasks("train") + Terminal().tasks("eval"):
        assert not is_done(task, tree_of(task.info["before"])) and not is_done(task, {})
        assert is_done(task, tree_of(task.info["after"], task.info["modes"]))


# Written from the words of each job alone.
SOLUTIONS = {
    "write": (r"the line '(.+)' into the file (.+)\. When", "mkdir -p $(dirname {1}); echo '{0}' > {1}"),
    "delete": (r"ends in (\.\w+), in all", "find . -name '*{0}' -delete"),
    "count": (r"lines of (\S+) that contain the word (\w+),", "grep -c {1} {0} > count.txt"),
    "rename": (r"every \.(\w+) file in (\w+) so that it ends in \.(\w+) ", "cd {1}; for f in *.{0}; do mv $f ${{f%.{0}}}.{2}; done"),
    "move": (r"each file in (\w+) into", "cd {0}; for f in *.*; do mkdir -p ${{f##*.}}; mv $f ${{f##*.}}; done"),
    "largest": (r"file below (\w+) into", "find {0} -type f -printf '%s %p\\n' | sort -n | tail -1 | cut -d' ' -f2 > largest.txt"),
    "permissions": (r"(755) .*(600)", "find . -name '*.sh' -exec chmod {0} {{}} +; find . -name '*.key' -exec chmod {1} {{}} +"),
    "replace": (r"word (\w+) by (\w+) everywhere", "find . -name '*.conf' | xargs sed -i s/{0}/{1}/g"),
    "total": (r"(\S+) has a name .* amounts of (\w+) into", "awk -F, '$1 == \"{1}\" {{ n += $2 }} END {{ print n }}' {0} > total.txt"),
    "merge": (r"files in (\w+) in", "cat {0}/* | sort -u > merged.txt"),
    "search": (r"below (\w+) that contain the word (\w+) into", "grep -rlw {1} {0} | sort > found.txt"),
}  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_job_can_be_done(kind):
    pattern, command = SOLUTIONS[kind]
    tasks = [task for split in ("train", "eval") for task in Terminal().tasks(split) if task.info["kind"] == kind]
    for task in tasks[:2] + tasks[-1:]:
        words = re.search(pattern, task.prompt[0]["content"]).groups()
        (result,) = run(command.format(*words), tree=tree_of(task.info["before"]))
        assert is_done(task, result.tree), (task, result.output)


TASK = Task("t", [], {"kind": "move", "before": {"a.txt": "x"}, "after": {"d/a.txt": "x"}, "modes": {}})


@needs_sandbox
@pytest.mark.parametrize(
    ("command", "done"),
    [
        ("mkdir d; mv a.txt d", True),
        ("mkdir d; ln a.txt d/a.txt; rm a.txt; touch more", True),
        ("mkdir d; cp a.txt d", False),
        ("mkdir d; echo y > d/a.txt; rm a.txt", False),
        ("mkdir d; mv a.txt d/b; ln -s b d/a.txt", False),
        ("mkdir e; mv a.txt e; ln -s e d", False),
        ("mkdir d; rm a.txt; mkfifo d/a.txt", False),
        ("rm a.txt; mkdir -p d/a.txt", False),
        ("rm a.txt; mkdir d; ln -s /proc/self/root/home/user d/a.txt", False),
        ("cd ..; mv user/a.txt /tmp; ln -s /tmp user/d", False),
        ("mkdir d; mv a.txt d; chmod 000 d", True),
    ],
)
def test_a_link_is_no_file(command, done):
    (result,) = run(command, tree=tree_of({"a.txt": "x"}))
    assert is_done(TASK, result.tree) == done, result


# Episodes


def call_of(command, name="shell"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'command': command}})}\n</tool_call>"


def play(*replies, task, outside=None, renderer=RENDERER, ids=text_ids, eos=EOS, **options):
    """The trace of an episode in which the model says these texts, the last one over and over."""

    async def sample(prompt_ids, turn, messages, tools):
        completion = [*ids(replies[min(turn, len(replies) - 1)]), eos]
        return Completion(completion, [-1.0] * len(completion), "stop", 0)

    trace = Trace()
    agent = Agent(trace, renderer, sample, *[outside] if outside else [])
    asyncio.run(Terminal(**{"warnings": 0.0} | options).play(task, agent))
    return trace


def a_task(kind):
    return next(task for task in Terminal().tasks("train") if task.info["kind"] == kind)


@needs_sandbox
def test_an_episode():
    entered = []

    class Outside:
        def __enter__(self):
            entered.append(running("sandbox"))

        def __exit__(self, *_):
            pass

    task = a_task("merge")
    folder = next(iter(task.info["before"])).split("/")[0]
    trace = play(
        call_of("ls"),
        call_of(f"cat {folder}/* | sort -u > merged.txt"),
        call_of("cat nowhere"),
        "Done.",
        task=task,
        outside=Outside,
    )
    assert trace.reward == 1.0 and trace.num_turns == 4 and len(trace.branches) == 1 and len(entered) == 3
    said = [message["content"] for message in trace.messages if message["role"] == "tool"]
    assert said == [folder, "[no output]", "cat: nowhere: No such file or directory\n[exit code 1]"]
    assert trace.metrics == {"calls": 3, "malformed_calls": 0, "stopped_commands": 0}


@needs_sandbox
def test_only_the_files_count():
    task = a_task("delete")
    assert play("I did it, it is done.", task=task).reward == 0.0
    assert play(call_of("rm -rf *"), "Done.", task=task).reward == 0.0
    pattern, command = SOLUTIONS["delete"]
    right = call_of(command.format(*re.search(pattern, task.prompt[0]["content"]).groups()))
    assert play(right, "", task=task).reward == 1.0
    assert play(right, "", task=task, max_turns=1).reward == 1.0
    undone = play(right, call_of("rm -rf ~/* ~; sleep 9"), "Done.", task=task, command_seconds=0.5)
    assert undone.reward == 0.0 and undone.metrics["stopped_commands"] == 1
    assert "[stopped after 0.5 s]" in undone.messages[-2]["content"]


@needs_sandbox
@pytest.mark.parametrize(
    "call",
    ["<tool_call>{", "<tool_call>[]</tool_call>", call_of("ls", name="bash"), call_of(None), call_of(["ls"]), call_of({"command": "ls"}), call_of(1),
     call_of("a\0b"), call_of("\ud800"), call_of("x" * 40_000), '<tool_call>{"name": "shell", "arguments": "ls"}</tool_call>',
     '<tool_call>{"name": "shell", "arguments": {"commands": "ls"}}</tool_call>'],
)  # fmt: skip
def test_malformed_calls(call):
    trace = play(call, "Done.", task=a_task("write"))
    assert trace.metrics["malformed_calls"] == trace.metrics["calls"] == 1 and trace.reward == 0.0
    assert trace.messages[2]["content"].startswith("error: ")


@needs_sandbox
def test_several_calls_in_a_turn_follow_one_another():
    trace = play(call_of("echo 1 > a") + "\n" + call_of("cat a"), "Done.", task=a_task("write"))
    assert [message["content"] for message in trace.messages[2:4]] == ["[no output]", "1"]


def test_the_preset_is_one():
    config = runpy.run_path(str(ROOT / "configs" / "echo_terminal_qwen3.py"))["config"]
    (source,) = config.sources
    assert load_filter(source.algo.filter) is drop_warnings and isinstance(source.env, Terminal)
    assert make_renderer("qwen3", make_tokenizer(), "qwen3", **config.renderer_args)


# Warnings, and echo's filter


@needs_sandbox
def test_warnings_are_a_share_and_repeat_with_the_task():
    task = a_task("write")
    commands = [call_of("echo hi")] * 4

    def answers(**options):
        return [m["content"] for m in play(*commands, "Done.", task=task, **options).messages if m["role"] == "tool"]

    assert answers(warnings=0.0) == ["hi"] * 4
    always = answers(warnings=1.0)
    assert all(re.fullmatch(r"warning: [^\n]+\nhi", answer) for answer in always) and len(set(always)) > 1
    env = Terminal()
    shares = [bool(env._warning(f"task {i}")) for i in range(2000)]
    assert 0.2 < np.mean(shares) < 0.3 and env._warning("task 5") == env._warning("task 5")


def ce_weights(trace, renderer, **options):
    echo = ALGORITHMS["echo"](EchoConfig(**options), renderer=renderer)
    asyncio.run(echo.finalize_episode(Episode("", "", Task("", []), [trace])))
    return [np.zeros(len(b)) if b.ce_weights is None else b.ce_weights for b in trace.branches]


TEXTS = [
    "warning: the index is 3 days old\nhi",
    "ä€😀\nwarning: ö 😀\n\n\nWARNING: x\nno warn\ning: at all\n",
    "rm: Warning: last line, no break",
    "\nwarning:\r\n\nnothing",
    "no line of it",
    "warning: warning:\nwarning: \n",
]


def merged_renderer():
    """A tokenizer whose tokens end in the middle of characters and hold the end of one line and the start of the next."""
    pairs = [
        ("Ċ", "Ċ"),
        ("Ċ", "w"),
        ("a", "r"),
        ("Ċw", "ar"),
        ("ð", "Ł"),
        ("n", "i"),
        ("ni", "n"),
        ("nin", "g"),
        (":", "Ġ"),
        ("x", "Ċ"),
    ]
    tokenizer = byte_tokenizer(merges=pairs)
    return make_renderer("qwen3", tokenizer, "qwen3"), tokenizer


@pytest.mark.parametrize("merged", [False, True])
def test_the_filter_takes_the_lines_that_it_names_and_nothing_else(merged):
    if merged:
        renderer, tokenizer = merged_renderer()
        backend, end = tokenizer.backend_tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>")
        ids = lambda text: backend.encode(text, add_special_tokens=False).ids  # noqa: E731
    else:
        renderer, ids, end = RENDERER, text_ids, EOS
    trace, texts = (
        Trace(reward=1.0),
        [f"[{text}]" for text in TEXTS],
    )  # no token reaches into the scaffold around a text

    async def sample(prompt_ids, turn, messages, tools):
        completion = [*ids("warning: I say\n"), end]
        return Completion(completion, [-1.0] * len(completion), "stop", 0)

    async def talk():
        agent = Agent(trace, renderer, sample)
        await agent.say({"role": "user", "content": "warning: a task"})
        for text in texts:
            await agent.say({"role": "tool", "content": text, "tool_call_id": "1"})

    asyncio.run(talk())
    (plain,), (filtered,) = (
        ce_weights(trace, renderer),
        ce_weights(trace, renderer, filter="envs.terminal.drop_warnings"),
    )
    (branch,) = trace.branches
    told = [i for i in range(len(branch)) if plain[i]]
    assert {plain[i] for i in told} == {0.1} and set(filtered) <= {0.0, 0.1} and not filtered[plain == 0].any()

    # What each token is in bytes, from the vocabulary; which bytes are of a line that says warning.
    pieces = [branch_bytes(renderer, int(branch.token_ids[i])) for i in told]
    assert b"".join(pieces).decode() == "".join(texts)
    wanted, at = [], 0
    for text in texts:
        for line in re.findall(r"[^\n]*\n|[^\n]+", text):
            wanted += [("warning:" in line.lower())] * len(line.encode())
    for i, piece in zip(told, pieces, strict=True):
        assert (filtered[i] == 0.0) == any(wanted[at : at + len(piece)]), (piece, i)
        at += len(piece)
    dropped = b"".join(piece for i, piece in zip(told, pieces, strict=True) if filtered[i] == 0)
    if not merged:
        lines = [line for text in texts for line in re.findall(r"[^\n]*\n|[^\n]+", text) if "warning:" in line.lower()]
        assert dropped.decode() == "".join(lines)


@needs_sandbox
def test_a_batch_of_episodes_learns_what_the_shell_said_and_no_warning(tmp_path):
    algo = EchoConfig(filter="envs.terminal.drop_warnings")
    source = Source(env=Terminal(warnings=1.0), algo=algo, group_size=2)
    config = Config(sources=[source], batch_size=4, seq_len=4096).resolved()
    engine = Fake([[*text_ids(call_of("echo hi; echo ho")), EOS]] * 4)
    monitor = Monitor(tmp_path / "run", 10, Console(file=open(os.devnull, "w")))
    branches, metrics = asyncio.run(Rollouts(config, engine, RENDERER, monitor).collect(1))
    assert metrics["env/terminal/calls"] == 1.0 and metrics["rollouts/errored"] == 0.0 and len(branches) == 4
    for branch in branches:
        assert "warning: " in RENDERER.decode(branch.token_ids)
        assert RENDERER.decode(branch.token_ids[branch.ce_weights > 0]) == "hi\nho"


BYTES = {}


def branch_bytes(renderer, id_):
    """The bytes that a token of a byte-level vocabulary stands for."""
    if not BYTES:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        BYTES.update({chr(byte): byte for byte in printable})
        others = [byte for byte in range(256) if byte not in printable]
        BYTES.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return bytes(BYTES[letter] for letter in renderer.tokenizer.convert_ids_to_tokens(id_))


def test_the_filter_s_patterns_and_masks():
    branch = Branch()
    ids = text_ids("one\nTwo\nthree")
    trace = Trace(branches=[branch])
    branch.append(np.array(ids), False, np.full(len(ids), np.nan), ["tool"] * len(ids), [True] * len(ids))
    branch.append(np.array(text_ids("two\n")), True, np.zeros(4), ["assistant"] * 4, [True] * 4)
    assert [text for _, text in told_lines(branch, RENDERER)] == ["one", "Two", "three"]
    for patterns, dropped in (("two", "Two\n"), (["one", "three"], "one\nthree"), ([], ""), ("four", "")):
        (mask,) = drop_warnings(trace, renderer=RENDERER, patterns=patterns)
        assert RENDERER.decode(branch.token_ids[~mask]) == dropped and mask[len(ids) :].all()


def test_a_filter_that_asks_for_no_renderer_gets_none():
    def mine(trace, *, word):
        return [np.ones(len(branch)) for branch in trace.training_branches()]

    assert keep_masks(mine, Trace(), {"word": 1}, RENDERER) == []
