"""A shell for what a model writes: one command at a time under bubblewrap, on files that live in a value.

    files ──tar──> [ outer sandbox: a tmpfs of bounded size  [ inner sandbox: the command ] ] ──tar──> files

The file system of an episode is a `Tree` in this process and lies nowhere else. `run_command` unpacks it into a fresh tmpfs, runs the command
on it and packs what the command left. So there is nothing to clean up after an episode, a command that ruins its sandbox ruins one
command, and whoever grades looks at paths and bytes in a dict: there is no link to follow. Kept are files, folders, symbolic links and
permissions; not times (all become one moment of 2001, so that a listing is the same at every run), and a hard link becomes a file of its own. Nothing of a shell is kept:
each command starts in home, with the same variables.

Two sandboxes, because tar must not share one with the command: all that the command started is gone before tar looks, and nothing of
tar, of its pipes or of this process can be seen from the inner one. There:

- namespaces of its own for users, processes, mounts, network (no interface but loopback), IPC and host name; no further user namespaces
- /usr/bin, /usr/lib, /usr/lib64 and /usr/share read-only; writable: its home and /tmp, which share `disk_mb`; nothing else
- no capability, no setuid, no terminal, an environment of four variables
- no system call that keeps memory which no process has mapped, or that has often been a way out (`REFUSED`)
- limits (`Limits`); what runs when the command ends, or its time, is killed with the process namespace
- the first to be killed where the machine runs out of memory

There is no way to run without. Run by root it runs as nobody: the kernel exempts root from the limit on processes.

What the limits do not bound: `memory_mb` holds for each process, so a command may take `processes` times as much, and the kernel's own
memory for empty files and buffers beside it, until its time is over; it may keep every core busy as long. What is readable:
what this machine has installed in those folders, and what /proc says of the kernel and the hardware. The kernel is the wall: a hole in it
is a way out, to the rights of nobody or of the user who trains. No tool of this size bounds more; a virtual machine does.
"""

import asyncio
import errno
import io
import json
import os
import shutil
import stat
import struct
import subprocess
import tarfile
import weakref
from dataclasses import dataclass
from typing import Any

HOME, TMP = "home", "tmp"  # first parts of a path in a Tree: /home/user and /tmp in the sandbox
MAX_COMMAND = 32 * 1024  # bytes: the kernel's limit for one argument is four times as much
MAX_OUTPUT = 2**20  # bytes of a command's output that are read at all; then its pipe is closed
MAX_PATH = 1000  # bytes of a path in a Tree
NOBODY = 65534
INSTALL = "install it with `apt-get install bubblewrap` (Debian, Ubuntu) or `dnf install bubblewrap` (Fedora)"


@dataclass(frozen=True)
class Limits:
    """Of one command. seconds: until it is stopped. memory_mb: address space of each process. processes: at once, the shell and
    threads included. disk_mb: home and /tmp together, in whole pages of 4 KiB for each file."""

    seconds: float = 10.0
    memory_mb: int = 256
    processes: int = 32
    disk_mb: int = 16


@dataclass(frozen=True)
class Entry:
    """What lies at a path. kind: "file", "folder", "link" or "other". content: of a file; of a link, what it points to."""

    kind: str
    content: bytes = b""
    mode: int = 0o644


Tree = dict[str, Entry]  # by path, such as "home/notes.txt"; every folder has an entry


@dataclass
class Result:
    """What a command left. exit_code: None if its time was over. output: stdout and stderr as they came, at most MAX_OUTPUT bytes.
    undone: it left more than fits, and `tree` is the one from before."""

    output: bytes
    exit_code: int | None
    tree: Tree
    undone: bool


def tree_of(files: dict[str, str], modes: dict[str, int] | None = None) -> Tree:
    """A home with these files, by path in it."""
    tree = {HOME: Entry("folder", mode=0o755), TMP: Entry("folder", mode=0o755)}
    for path, text in files.items():
        parts = f"{HOME}/{path}".split("/")
        for depth in range(2, len(parts)):
            tree.setdefault("/".join(parts[:depth]), Entry("folder", mode=0o755))
        tree["/".join(parts)] = Entry("file", text.encode(), (modes or {}).get(path, 0o644))
    return tree


def require_bubblewrap() -> None:
    """Raise ValueError, in one line, where commands can not be sandboxed."""
    if _bwrap() is None:
        raise ValueError(f"--env terminal needs bubblewrap, and there is no /usr/bin/bwrap: {INSTALL}")
    limits = Limits()
    try:
        done = subprocess.run(
            _argv("true", limits), input=_pack(tree_of({})), timeout=60, capture_output=True, **_who()
        )
        _read(done.stdout, done.stderr, done.returncode, tree_of({}), limits)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"--env terminal: bubblewrap makes no sandbox here ({why}); it must be 0.8 or newer, and unprivileged user namespaces "
            "must be allowed to it (in a container, by its security profile)"
        ) from None


async def run_command(command: str, tree: Tree, limits: Limits) -> Result:
    """Run a command by bash, in home, on the files of a tree. As many run at once as there are cores; others wait, and their
    time does not count.

    Raises ValueError for a command that bash can not be given, and RuntimeError where the sandbox itself fails.
    """
    size = len(command.encode(errors="replace"))
    if size > MAX_COMMAND:
        raise ValueError(f"a command has at most {MAX_COMMAND} bytes, this one {size}")
    if "\0" in command or any("\ud800" <= char <= "\udfff" for char in command):
        raise ValueError("a command is text without null characters and surrogates")
    async with _slots():
        process = await asyncio.create_subprocess_exec(
            *_argv(command, limits),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **_who(),
        )
        try:
            async with asyncio.timeout(limits.seconds + 60):
                packed, errors = await process.communicate(_pack(tree))
        except TimeoutError:
            raise RuntimeError("the sandbox did not end by itself") from None
        finally:
            # Also where the episode was cancelled. With bubblewrap its process namespace dies, and with that everything in it.
            if process.returncode is None:
                process.kill()
                await asyncio.shield(process.wait())
    return _read(packed, errors, process.returncode, tree, limits)


# $1: the command's seconds, $2: bytes of output, $3: bytes of the archive, $4: the inner sandbox's filter of system calls, $5: the
# command, then the arguments of the inner sandbox.
# tar may look into folders that the command closed; the capability for that goes no further than here. The command can reach whatever
# the inner sandbox's first process has open, so that has the same pipe for all that it prints, and no other.
OUTER = r"""
set -o pipefail
echo 1000 > /proc/self/oom_score_adj
seconds=$1 output=$2 archive=$3 command=$5
printf "$4" > /run/filter
shift 5
tar xpC /files || exit 99
timeout "$seconds" setpriv --ambient-caps=-all --inh-caps=-all \
    "$@" bash -c -- "$command" < /dev/null 2>&1 3> /run/status 4< /run/filter | head -c "$output" > /run/output
echo "{\"timeout\": ${PIPESTATUS[0]}}" >> /run/status
tar cC /run status output -C /files home tmp | head -c "$archive"
"""


def _argv(command: str, limits: Limits) -> list[str]:
    """The command line that runs a command. It reads a packed tree and writes one, with `status` and `output` before it."""
    inner = [
        *["--disable-userns", "--cap-drop", "ALL", "--hostname", "sandbox", "--json-status-fd", "3", "--seccomp", "4"],
        *["--bind", "/files/home", "/home/user", "--bind", "/files/tmp", "/tmp", "--chdir", "/home/user"],
    ]
    outer = [
        *["--cap-drop", "ALL", "--cap-add", "CAP_DAC_OVERRIDE", "--dir", "/tmp"],
        *["--size", str(2 * MAX_OUTPUT), "--tmpfs", "/run", "--size", str(limits.disk_mb * 2**20), "--tmpfs", "/files"],
    ]
    rlimits = {
        "as": limits.memory_mb * 2**20,
        "core": 0,
        "cpu": int(limits.seconds) + 1,
        "fsize": limits.disk_mb * 2**20,
        "nofile": 256,
        "nproc": limits.processes + 6,  # what is there before the command
    }
    bounded = ["prlimit", *(f"--{name}={value}:{value}" for name, value in rlimits.items())]
    numbers = [f"{limits.seconds:f}", str(MAX_OUTPUT), str(_max_archive(limits))]
    return _sandbox(outer, [*bounded, "bash", "-c", OUTER, "outer", *numbers, _filter(), command, *_sandbox(inner, [])])


def _sandbox(mounts: list[str], argv: list[str]) -> list[str]:
    """A command line that runs another one in a sandbox."""
    words = [_bwrap() or "bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"]
    words += ["--die-with-parent", "--new-session", "--clearenv"]
    for name, value in {"PATH": "/usr/bin", "HOME": "/home/user", "LANG": "C.UTF-8", "TZ": "UTC"}.items():
        words += ["--setenv", name, value]
    for path in ("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/share", "/etc/alternatives", "/etc/ld.so.cache"):
        words += ["--ro-bind-try", path, path]
    for name in ("bin", "lib", "lib64"):
        words += ["--symlink", f"usr/{name}", f"/{name}"]
    # Not `--dev`: the tmpfs that it makes, /dev/shm included, is half the machine's memory in size.
    words += ["--proc", "/proc", "--size", "65536", "--tmpfs", "/dev"]
    for name in ("null", "zero", "full", "random", "urandom"):
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        words += ["--symlink", f"/proc/self/{target}", f"/dev/{name}"]
    return [*words, *mounts, "--remount-ro", "/dev", "--remount-ro", "/", *argv]


# System calls that a command goes without, by their numbers on x86_64 and on aarch64: those that keep memory that no process has mapped,
# and the ones through which most ways out of a sandbox have led.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "perf_event_open": (298, 241),
    "ptrace": (101, 117),
    "userfaultfd": (323, 282),
}


def _filter() -> str:
    """A seccomp program (classic BPF) that answers the refused calls, and those of any other architecture, by "no such call"; escaped
    for printf. Raises ValueError on a machine whose numbers are not known."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise ValueError(
            f"--env terminal: no filter of system calls for {machine}, only for {', '.join(ARCHITECTURES)}"
        )
    column = list(ARCHITECTURES).index(machine)
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    refused = [(equal, numbers[column]) for numbers in REFUSED.values()]
    refused.append((at_least, 2**30))  # x86_64's second table, of 32-bit pointers
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, ARCHITECTURES[machine]),
        (answer, 0, 0, 0x50000 | errno.ENOSYS),
        (load, 0, 0, 0),
    ]
    program += [(code, len(refused) - number, 0, value) for number, (code, value) in enumerate(refused)]
    program += [(answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x50000 | errno.ENOSYS)]
    return "".join(f"\\x{byte:02x}" for step in program for byte in struct.pack("HBBI", *step))


def _bwrap() -> str | None:
    """Where both sandboxes find it."""
    return shutil.which("bwrap", path="/usr/bin")


def _who() -> dict[str, Any]:
    """Options of a subprocess that has nothing of this one: no variable, no folder, no terminal, no rights of root."""
    who: dict[str, Any] = {"env": {}, "cwd": "/", "start_new_session": True}
    return who if os.getuid() else who | {"user": NOBODY, "group": NOBODY, "extra_groups": []}


_SLOTS: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = weakref.WeakKeyDictionary()


def _slots() -> asyncio.Semaphore:
    """This event loop's permits to run a command."""
    return _SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))


def _max_archive(limits: Limits) -> int:
    """Bytes of the longest archive that is read: as much again as the files, for headers."""
    return 2 * limits.disk_mb * 2**20 + MAX_OUTPUT


TYPES = {"file": tarfile.REGTYPE, "folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "other": tarfile.FIFOTYPE}


def _pack(tree: Tree) -> bytes:
    """A tar archive of a tree."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, entry in sorted(tree.items()):  # a folder before what is in it, and `find` tells the same each time
            member = tarfile.TarInfo(path)
            member.type, member.mode, member.mtime = TYPES[entry.kind], entry.mode, 10**9
            if entry.kind == "link":
                member.linkname = os.fsdecode(entry.content)
            else:
                member.size = len(entry.content)
            archive.addfile(member, io.BytesIO(entry.content))
    return buffer.getvalue()


def _read(packed: bytes, errors: bytes, exit_code: int | None, before: Tree, limits: Limits) -> Result:
    """What came out of the sandbox. Raises RuntimeError where it did not run the command."""
    tree: Tree = {}
    status: dict[str, int] = {}
    output = b""
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive:
                if member.name == "status":
                    for line in archive.extractfile(member).read().splitlines():
                        status |= json.loads(line)
                elif member.name == "output":
                    output = archive.extractfile(member).read()
                elif member.isreg():
                    tree[member.name] = Entry("file", archive.extractfile(member).read(), stat.S_IMODE(member.mode))
                elif member.islnk():
                    tree[member.name] = tree[member.linkname]
                else:
                    kind = "link" if member.issym() else "folder" if member.isdir() else "other"
                    tree[member.name] = Entry(kind, os.fsencode(member.linkname), stat.S_IMODE(member.mode))
    except (tarfile.TarError, KeyError) as error:  # cut, or nothing at all
        exit_code = exit_code or 1
        errors = errors or str(error).encode()
    ran_out = status.get("timeout") == 124 and "exit-code" not in status
    if not ran_out and "exit-code" not in status:
        said = (errors + output)[-500:].decode(errors="replace").strip()
        raise RuntimeError(f"the sandbox failed: {said or 'it said nothing'}")
    pages = sum(-(-len(entry.content) // 4096) for entry in tree.values() if entry.kind == "file")
    names = max((len(os.fsencode(path)) for path in tree), default=0)
    undone = exit_code != 0 or pages > limits.disk_mb * 256 or names > MAX_PATH
    return Result(output, None if ran_out else status["exit-code"], before if undone else tree, undone)
