"""What keeps one episode from taking the time of all others.

An episode has a time limit (`Clock`) that stands still while a model works. All episodes share one event loop, so a limit alone
does not help against code that never awaits, such as `time.sleep` in a reward: the `Watchdog` interrupts that.

What this can not stop: a thread that an environment starts (`asyncio.to_thread`), one long call into a library that never
returns to Python, and code that catches BaseException and goes on.

`Stop` ends the whole run when it is asked to.
"""

import asyncio
import atexit
import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any


class RunStopped(Exception):
    """The run can not go on; the message says why and what to change."""


class Clock:
    """The time limit of an episode in seconds, to be entered around its play. It stands still while a model works, so that one
    slow episode takes no other's time.

    Leaving it raises TimeoutError if the limit was reached, whatever the play made of that, and stops what the play left
    running: a request that waits when the weights change would end the run.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.limit = seconds, asyncio.timeout(seconds)
        self.tasks: set[asyncio.Task] = set()  # that the play has started
        self.blocked = False  # it was interrupted, as it let nobody else run
        self._waiting, self._left = 0, seconds

    async def __aenter__(self) -> "Clock":
        self._token = CLOCK.set(self)
        await self.limit.__aenter__()
        return self

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> None:
        CLOCK.reset(self._token)
        try:
            with contextlib.suppress(TimeoutError):  # the limit's own, which says nothing
                await self.limit.__aexit__(kind, error, traceback)
        finally:
            left = [task for task in self.tasks if not task.done()]
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=1)
        if self.blocked:
            reason = "for so many seconds it let nobody else run; await what takes long"
            raise TimeoutError(f"--rollout-timeout {self.seconds:g}: {reason}") from error
        if self.over:
            raise TimeoutError(f"still running after --rollout-timeout {self.seconds:g} s") from error

    @property
    def over(self) -> bool:
        """Whether the limit was reached."""
        return self.blocked or self.limit.expired()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Time inside does not count; an episode may be inside several times at once. What runs inside is not the episode's."""
        now = asyncio.get_running_loop().time
        if self._waiting == 0:
            self._left = self.limit.when() - now()
            self.limit.reschedule(None)
        self._waiting += 1
        token = CLOCK.set(None)
        try:
            yield
        finally:
            CLOCK.reset(token)
            self._waiting -= 1
            if self._waiting == 0:
                with contextlib.suppress(RuntimeError):  # the episode was ended from outside
                    self.limit.reschedule(now() + self._left)

    def extend(self, seconds: float) -> None:
        """Give back time that somebody else took."""
        if self._waiting == 0 and seconds > 0:
            with contextlib.suppress(RuntimeError, TypeError):  # it has not begun, or is over
                self.limit.reschedule(self.limit.when() + seconds)


CLOCK: ContextVar[Clock | None] = ContextVar(
    "clock", default=None
)  # of the episode whose code runs; None: nobody's, a model's


if hasattr(signal, "setitimer"):  # an alarm that outlives its handler would kill a process that is ending
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)


class Watchdog:
    """While it is entered, an episode that runs for `seconds` without an await gets a TimeoutError where it is, and `clocks` get
    back what others took from them in this way.

    An alarm signal that the event loop keeps putting off finds out who blocks it: a beat of the loop sets it anew, so it comes
    only if the loop does not turn. Signals reach the main thread of a Unix process alone; elsewhere nobody is interrupted.
    """

    def __init__(self, seconds: float, clocks: set[Clock]) -> None:
        self.seconds, self.clocks, self.every = seconds, clocks, min(1.0, seconds / 4)
        self._held: Counter[Clock | None] = Counter()  # seconds since the last beat, by whose code the alarms found

    def __enter__(self) -> "Watchdog":
        self._loop = asyncio.get_running_loop()
        self._factory = self._loop.get_task_factory()
        self._loop.set_task_factory(self._start_task)
        self._armed = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
        if self._armed:
            self._handler = signal.getsignal(signal.SIGALRM) or signal.SIG_DFL
        self._beat(self._loop.time())
        return self

    def __exit__(self, *_: Any) -> None:
        self._timer.cancel()
        self._loop.set_task_factory(self._factory)
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler)

    def _start_task(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine, **options: Any) -> asyncio.Task:
        task = asyncio.Task(coroutine, loop=loop, **options)
        context = options.get("context")
        clock = CLOCK.get() if context is None else context.get(CLOCK)
        if clock is not None:
            clock.tasks.add(task)
            task.add_done_callback(clock.tasks.discard)
        return task

    def _beat(self, due: float) -> None:
        late = self._loop.time() - due
        if late > self.every / 10:
            for clock in self.clocks:
                clock.extend(late - self._held[clock])
        self._held.clear()
        if self._armed:
            # The handler too: an environment's code may have set an alarm of its own in place of this one.
            signal.signal(signal.SIGALRM, self._alarm)
            signal.setitimer(signal.ITIMER_REAL, self.every, self.every)
        due = self._loop.time() + self.every / 2
        self._timer = self._loop.call_at(due, self._beat, due)

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        # The handler runs in the context of what it interrupts, so it sees whose code that is.
        clock = CLOCK.get()
        self._held[clock] += self.every
        if clock is not None and self._held[clock] > self.seconds:
            again, clock.blocked = clock.blocked, True
            # Code that takes any exception for an answer is cancelled the next time.
            raise asyncio.CancelledError if again else TimeoutError(f"--rollout-timeout {self.seconds:g}")


class Stop:
    """SIGINT (Ctrl-C) and SIGTERM. The first lets the step that is running end; the second, or `grace` seconds, raises
    KeyboardInterrupt where the run is.

    Among other ranks (`alone` False) that happens inside of `released` alone, since elsewhere they wait for this one. tell: passes
    "asked" and "now" on to them, and `hear` takes what they pass on.
    """

    def __init__(self, grace: float, note: Callable[[str], None], alone: bool = True) -> None:
        self.grace, self.note = grace, note
        self.asked: int | None = None  # the signal
        self.tell: Callable[[str], None] = lambda word: None
        self._timer: threading.Timer | None = None
        self._held, self._late = not alone, False
        # A launcher passes on a signal that a terminal has sent to every process: within so many seconds they are one.
        self._same, self._since = 0.0 if alone else 2.0, 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.tell("asked")
            self._begin(number)
        elif time.monotonic() - self._since >= self._same:
            self.tell("now")
            self.end_now()

    def hear(self, word: str) -> None:
        """What another rank was asked for; to be called in the main thread."""
        if word == "now":
            self.end_now()
        elif self.asked is None:
            self._begin(signal.SIGTERM)

    def _begin(self, number: int) -> None:
        self.asked, self._since = number, time.monotonic()
        self.note(f"stopping after this step, or in {self.grace:g} s without it (once more to stop at once)")
        self._timer = threading.Timer(max(self.grace, self._same), os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()

    def in_time(self) -> None:
        """The run has come to its end within the grace."""
        if self._timer is not None:
            self._timer.cancel()

    def end_now(self) -> None:
        """Raise KeyboardInterrupt, now or at the end of what must not be interrupted."""
        if not self._held:
            self._held = self._same > 0  # once, where others wait for what comes after it
            raise KeyboardInterrupt
        self._late = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What is inside happens whole."""
        with self._hold(True):
            yield

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """What is inside may be interrupted."""
        with self._hold(False):
            yield

    @contextlib.contextmanager
    def _hold(self, held: bool) -> Iterator[None]:
        before, self._held = self._held, held
        try:
            self._raise_late()
            yield
        finally:
            self._held = before
            self._raise_late()

    def _raise_late(self) -> None:
        if self._late and not self._held:
            self._late = False
            self.end_now()
