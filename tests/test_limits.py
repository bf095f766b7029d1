"""A13: an environment that never returns, awaiting, blocking or computing, costs its own episode and nobody else's time."""

import asyncio
import contextlib
import signal
import threading
import time
from dataclasses import dataclass

import pytest

from engines.hf import HFEngine
from envs import ENVS
from limits import CLOCK, Clock, Watchdog
from tests.test_rollouts import EchoEnv, Fake, advantages, build, collect  # noqa: F401  (build is a fixture)


def busy():
    """Python code that never ends by itself."""
    n = 0
    while True:
        n += 1


async def nap():
    await asyncio.sleep(1e6)


async def awaits():
    await nap()


async def sleeps():
    time.sleep(1e6)


async def computes():
    busy()


async def swallows():
    with contextlib.suppress(Exception):
        time.sleep(1e6)


async def swallows_for_ever():
    while True:
        with contextlib.suppress(Exception):
            busy()


async def swallows_the_end():
    with contextlib.suppress(asyncio.CancelledError):
        await nap()


async def in_a_task():
    await asyncio.gather(nap(), sleeps(), nap())


async def in_a_task_beside():
    await asyncio.gather(asyncio.sleep(0), computes(), return_exceptions=True)


async def now_and_then():
    for n in range(100):
        assert n < 6, "it got back the time that it took itself"
        time.sleep(0.45)
        await asyncio.sleep(0)


WAYS = {
    awaits: 1,
    sleeps: 1,
    computes: 1,
    swallows: 0.5,
    swallows_for_ever: 0.5,
    swallows_the_end: 0.5,
    in_a_task: 0.5,
    in_a_task_beside: 0.5,
    now_and_then: 1,
}  # and the limit in seconds


@dataclass
class Hangs(EchoEnv):
    """The reward of the second of four rollouts is worked out in a way that does not end."""

    hang: object = None

    async def play(self, task, agent):
        self.played = number = self.played + 1
        await agent.say(*task.prompt)
        if number == 2:
            await self.hang()
        agent.trace.reward = float(number % 4 == 0)


@pytest.fixture
def played(build, monkeypatch):  # noqa: F811
    """(branches, metrics, seconds, tasks that are left) of a step with an environment."""

    def play(env, engine=None, timeout=1.0, batch_size=3):
        monkeypatch.setitem(ENVS, "hangs", type(env))
        rollouts = build(env=env, group_size=4, batch_size=batch_size, rollout_timeout=timeout, max_new_tokens=4)
        rollouts.engine = engine or rollouts.engine

        async def step():
            start = time.perf_counter()
            branches, metrics = await rollouts.collect(1)
            return branches, metrics, time.perf_counter() - start, asyncio.all_tasks() - {asyncio.current_task()}

        return asyncio.run(step())

    return play


@pytest.mark.parametrize("hang", WAYS)
def test_one_of_four_never_ends(hang, played, build):  # noqa: F811
    before = signal.getsignal(signal.SIGALRM), threading.active_count()
    branches, metrics, seconds, left = played(Hangs(hang=hang), timeout=WAYS[hang])
    assert seconds < 5 and metrics["rollouts/errored"] == metrics["rollouts/stop_timeout"] == 1
    rows = build.rows()
    assert f"--rollout-timeout {WAYS[hang]}" in rows[1]["error"] and rows[1]["error"].startswith("TimeoutError")
    assert [row["error"] for row in (rows[0], rows[2], rows[3])] == [None] * 3
    awaited = hang in (awaits, swallows_the_end, now_and_then)
    assert ("still running" if awaited else "let nobody else run") in rows[1]["error"]
    assert advantages(branches) == pytest.approx([-1 / 3, -1 / 3, 2 / 3]), "the other three train"
    assert left == set() and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert (signal.getsignal(signal.SIGALRM), threading.active_count()) == before


def test_the_same_through_the_engine_that_waits_for_everybody(played, tiny_path):
    _, metrics, seconds, left = played(Hangs(hang=sleeps), HFEngine(tiny_path), batch_size=2)
    assert metrics["rollouts/stop_timeout"] == 1 and seconds < 10 and left == set()


def test_who_awaits_does_not_pay_for_who_blocks(played):
    """0.6 s outside and a limit of 1 s fit, though another blocks for more than a second meanwhile."""

    @dataclass
    class Patient(Hangs):
        async def play(self, task, agent):
            self.played = number = self.played + 1
            await agent.say(*task.prompt)
            if number == 2:
                time.sleep(1e6)
            until = time.perf_counter() + 0.6
            while time.perf_counter() < until:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)
            agent.trace.reward = float(number % 4 == 0)

    branches, metrics, seconds, _ = played(Patient())
    assert len(branches) == 3 and metrics["rollouts/stop_timeout"] == 1 and seconds < 5


def test_many_short_works_in_one_turn_of_the_loop_are_nobody_s_fault():
    async def work(clock):
        async with clock:
            await asyncio.sleep(0.01)
            time.sleep(0.1)
            await asyncio.sleep(0.01)

    async def main():
        clocks = {Clock(0.6) for _ in range(12)}
        with Watchdog(0.6, clocks):
            return await asyncio.gather(*map(work, clocks))

    assert asyncio.run(main()) == [None] * 12


class Slow(Fake):
    """Works without letting the loop turn, in the coroutine of the episode that asks."""

    async def generate(self, prompt_ids, sampling):
        if sampling.key[-3:] == (1, 0, 0):
            time.sleep(2)
        await asyncio.sleep(0)
        return await super().generate(prompt_ids, sampling)


def test_a_model_that_works_long_is_no_episode_s_fault(played):
    @dataclass
    class Waits(Hangs):
        async def play(self, task, agent):
            self.played = number = self.played + 1
            if number != 2:
                await asyncio.sleep(0.5)  # longer than is left of its second, if the model's work counted
            await agent.say(*task.prompt)
            agent.trace.reward = float(number % 4 == 0)

    _, metrics, seconds, left = played(Waits(), Slow(), batch_size=4)
    assert metrics["rollouts/errored"] == 0 and seconds > 2 and left == set()


def test_an_environment_s_own_alarm_and_its_own_timeout(played, build):  # noqa: F811
    """Graders set alarms of their own, and leave none behind: who blocks after that is found all the same."""

    async def alarmed():
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(3)
        signal.alarm(0)
        await asyncio.sleep(0.3)
        time.sleep(1e6)

    async def own():
        await asyncio.wait_for(asyncio.sleep(1e6), 0.05)

    _, metrics, seconds, _ = played(Hangs(hang=alarmed))
    assert metrics["rollouts/stop_timeout"] == 1 and seconds < 5
    _, metrics, _, _ = played(Hangs(hang=own))
    assert metrics["rollouts/stop_timeout"] == 0 and metrics["rollouts/stop_error"] == 1


def test_what_a_play_leaves_running_ends_with_it(played):
    """Else it would ask the engine when the weights have changed, or while they do."""
    background = []

    async def starts():
        background.append(asyncio.create_task(nap()))

    _, metrics, _, left = played(Hangs(hang=starts), batch_size=2)
    assert metrics["rollouts/errored"] == 0 and background[0].cancelled() and left == set()


def test_engines_tasks_are_not_the_episode_s():
    async def main():
        clock = Clock(5.0)
        with Watchdog(5.0, {clock}):
            async with clock:
                mine = asyncio.create_task(nap())
                with clock.stopped():
                    assert CLOCK.get() is None
                    theirs = asyncio.create_task(asyncio.sleep(0.05, "done"))
                assert CLOCK.get() is clock
            return mine.cancelled(), await theirs

    assert asyncio.run(main()) == (True, "done")


def test_without_signals_what_awaits_still_ends(played):
    """In a thread nobody can be interrupted, and limits hold for who awaits."""
    result = []
    thread = threading.Thread(target=lambda: result.append(played(Hangs(hang=awaits))))
    thread.start()
    thread.join(10)
    ((branches, metrics, _, _),) = result
    assert len(branches) == 3 and metrics["rollouts/stop_timeout"] == 1


def test_all_turns_share_one_limit():
    turns = []

    async def main():
        clock = Clock(0.5)
        with Watchdog(0.5, {clock}), pytest.raises(TimeoutError, match="still running after --rollout-timeout 0.5 s"):
            async with clock:
                for turn in range(10):
                    with clock.stopped():
                        await asyncio.sleep(0.1 if turn else 0.6)  # a model: costs nothing
                    turns.append(turn)
                    await asyncio.sleep(0.1)

    asyncio.run(main())
    assert 2 <= len(turns) <= 6
