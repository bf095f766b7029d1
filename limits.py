"""What keeps one episode from taking the time of all others.

An episode has a time limit (`Clock`) that stands still while a model works. All episodes share one event loop, so a limit alone
does not help against code that never awaits, such as `time.sleep` in a reward: the `Watchdog` interrupts that. `Stop` ends the
whole run when it is asked to.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from engines.base import EPISODE


class Clock:
    """The time limit of an episode in seconds. It stands still while a model works, so that one slow episode takes no other's
    time."""

    def __init__(self, seconds: float) -> None:
        self.limit = asyncio.timeout(seconds)
        self._waiting, self._left = 0, seconds

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Time inside does not count; an episode may be inside several times at once."""
        now = asyncio.get_running_loop().time
        if self._waiting == 0:
            self._left = self.limit.when() - now()
            self.limit.reschedule(None)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                with contextlib.suppress(RuntimeError):  # the episode was ended from outside
                    self.limit.reschedule(now() + self._left)

    def extend(self, seconds: float) -> None:
        """Give back time that somebody else took."""
        if self._waiting == 0:
            with contextlib.suppress(RuntimeError, TypeError):  # it has not begun, or is over
                self.limit.reschedule(self.limit.when() + seconds)


class Watchdog:
    """While it is entered, an episode that runs for `seconds` without an await gets a TimeoutError where it is, and `clocks` get
    back what such a stop took.

    It works by an alarm signal, hence in the main thread of a Unix process alone, and against what a signal interrupts: sleeping,
    waiting, Python code; not one long call into a library that never returns to Python.
    """

    def __init__(self, seconds: float, clocks: set[Clock]) -> None:
        self.seconds, self.clocks, self.every = seconds, clocks, min(1.0, seconds / 4)
        self._turns, self._seen, self._held = (
            0,
            (None, 0),
            0.0,
        )  # turns of the event loop, what the last alarm saw, for how long

    def __enter__(self) -> "Watchdog":
        self._loop = asyncio.get_running_loop()
        self._beat(self._loop.time())
        self._armed = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
        if self._armed:
            self._handler = signal.signal(signal.SIGALRM, self._alarm)
            signal.setitimer(signal.ITIMER_REAL, self.every, self.every)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler)
        self._timer.cancel()

    def _beat(self, due: float) -> None:
        self._turns += 1
        late = self._loop.time() - due
        if late > self.every:
            for clock in self.clocks:
                clock.extend(late)
        due = self._loop.time() + self.every / 2
        self._timer = self._loop.call_at(due, self._beat, due)

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        # The handler runs in the context of what it interrupts, so it sees whose code that is.
        seen = EPISODE.get(), self._turns
        self._held = self._held + self.every if seen == self._seen and seen[0] is not None else 0.0
        self._seen = seen
        if self._held >= self.seconds:
            self._held = 0.0
            raise TimeoutError(
                f"--rollout-timeout {self.seconds:g}: for so many seconds it let nobody else run; await what takes long"
            )


class Stop:
    """SIGINT (Ctrl-C) and SIGTERM. The first lets the step that is running end; the second, or `grace` seconds, raises
    KeyboardInterrupt where the run is."""

    def __init__(self, grace: float, note: Callable[[str], None]) -> None:
        self.grace, self.note = grace, note
        self.asked: int | None = None  # the signal
        self._held = self._late = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            self.end_now()
        self.asked = number
        self.note(f"stopping after this step, or in {self.grace:g} s without it (once more to stop at once)")
        timer = threading.Timer(self.grace, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    def end_now(self) -> None:
        """Raise KeyboardInterrupt, now or at the end of what must not be interrupted."""
        if not self._held:
            raise KeyboardInterrupt
        self._late = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What is inside happens whole."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self._late:
                self._late = False
                raise KeyboardInterrupt
