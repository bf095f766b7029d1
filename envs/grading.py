"""Graders that may never return, die, or run what a model wrote: in a process of their own, with a time limit.

    reward = await grade(agent, equal_math, "18", r"\\frac{36}{2}", needs="math_verify", seconds=10)

Computer algebra can take forever on one short line. Libraries guard themselves by an alarm signal, which works in the main
thread alone, and elsewhere turns a right answer into a wrong one without a word; and limits.py has that signal for itself. So they
run with their own limits off, in a worker whose alarm is the kernel's: one that runs over is ended and replaced. An answer that
could not be graded raises and is counted as an error; it is never the same as a wrong one.
"""

import asyncio
import atexit
import contextlib
import importlib.util
import json
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envs.base import Agent, Env

WORKERS = min(4, os.cpu_count() or 1)
START_SECONDS = (
    120  # in which a worker must import what the grader needs: a busy machine is no reason to call an answer slow
)
MEMORY = 8 * 2**30  # bytes of a worker's address space
# A worker may run what a model wrote, so it gets nothing from the environment that may be a secret.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
ROOT = str(Path(__file__).parent.parent)


async def grade(agent: Agent, function: Callable[..., Any], *args: Any, needs: str, seconds: float) -> Any:
    """What `function(*args)` returns, as JSON gives it back, computed in a worker while other episodes go on.

    The function is one of a module's, `needs` the package that it imports. Raises TimeoutError after `seconds`, and
    RuntimeError where the function raised or its process died.
    """
    with agent.outside():
        return await asyncio.to_thread(WORKER_POOL.call, function, *args, needs=needs, seconds=seconds)


class Pool:
    """Workers, started when they are wanted. Any number of threads may call at once; those beyond `size` wait."""

    def __init__(self, size: int = WORKERS) -> None:
        self._turns = threading.Semaphore(size)
        self._idle: list[subprocess.Popen] = []
        atexit.register(self.close)

    def call(self, function: Callable[..., Any], *args: Any, needs: str, seconds: float) -> Any:
        """`grade`, for those who can wait."""
        request, answer = pickle.dumps((needs, seconds, function, args)), b""
        with self._turns:
            worker = self._idle.pop() if self._idle else _start()
            if worker.poll() is not None:  # it died while it waited
                _stop(worker)
                worker = _start()
            try:
                with contextlib.suppress(BrokenPipeError):
                    worker.stdin.write(request)
                    worker.stdin.flush()
                    answer = worker.stdout.readline()
            finally:
                if answer.endswith(b"\n"):
                    self._idle.append(worker)
                else:  # it died, or an exception ended the wait: what it says later belongs to nobody
                    _stop(worker)
        if not answer.endswith(b"\n"):
            if worker.returncode == -signal.SIGALRM:
                raise TimeoutError(f"grading took longer than {seconds:g} seconds")
            raise RuntimeError(f"the grader's process died (exit code {worker.returncode})")
        answer = json.loads(answer)
        if "error" in answer:
            raise RuntimeError(f"the grader raised {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """End all workers that wait."""
        while self._idle:
            _stop(self._idle.pop())


WORKER_POOL = Pool()


def _start() -> subprocess.Popen:
    script = f"import sys; sys.path.insert(0, {ROOT!r}); from envs.grading import work; work()"
    known = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run, which may want to finish its step
        env=known | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def _stop(worker: subprocess.Popen) -> None:
    for pipe in (worker.stdin, worker.stdout):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that ends by itself leaves word why
        worker.wait(1)
    worker.kill()
    worker.wait()


def work() -> None:
    """A worker: read pickled (needs, seconds, function, args), answer by a line of JSON, until the pipe is closed."""
    import resource

    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # what a library prints is no answer, and exit() closes sys.stdin
        os.dup2(nothing, standard)
    logging.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for limit, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(limit, (value, value))
    while True:
        try:
            needs, seconds, function, args = pickle.load(requests)
        except EOFError:
            return
        try:
            signal.setitimer(signal.ITIMER_REAL, START_SECONDS)
            importlib.import_module(needs)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            answer = json.dumps({"value": function(*args)})
        except BaseException as error:  # SystemExit too: a model may write exit()
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(answer + "\n")
        answers.flush()


def installed(package: str) -> bool:
    """Whether a package can be imported, found out without importing it."""
    return importlib.util.find_spec(package) is not None


def require_seconds(env: Env) -> None:
    """Raise ValueError for a grading_timeout that is none."""
    if not (env.grading_timeout > 0 and math.isfinite(env.grading_timeout)):
        raise ValueError(f"--env.grading-timeout {env.grading_timeout:g}: must be a positive number")


def equal_math(gold: str, answer: str) -> bool:
    """Whether math-verify finds two LaTeX expressions equal. What it can not read is equal to nothing; raises ValueError where
    that is `gold`."""
    from math_verify import parse, verify

    # Its own limits are the alarm signal, which is the worker's here.
    wanted, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
    if not wanted:
        raise ValueError(f"math-verify can not read the right answer {gold!r}")
    return bool(verify(wanted, given, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} of a text, braces in it balanced; None where there is none, or it is not closed."""
    start = text.rfind("\\boxed{")
    depth = 0
    for i in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[i], 0) if text[i - 1] != "\\" else 0
        if depth == 0:
            return text[start + len("\\boxed{") : i].strip()
    return None
