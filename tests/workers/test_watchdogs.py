"""When a worker says that it lives: while steps run too, but not while one hangs."""

import asyncio

import pytest
from held_loop import Carried, HeldUp, Notes

from pdserve.base.clock import MonotonicClock
from pdserve.kvtransfer.doors import HEARTBEAT_S
from pdserve.worker.inbox import Inbox
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.messages import DrainAsked, Load, Ticked
from pdserve.worker.watchdog import LoopWatchdog, ThreadWatchdog


class OneStep(Notes):
    """A core that notes ticks, and is drained when asked."""

    def handle(self, event: Ticked | DrainAsked, now_s: float) -> list[str]:
        self.heard.append(event)
        self.drained |= isinstance(event, DrainAsked)
        return []

    @property
    def ticks(self) -> list[Ticked]:
        return [each for each in self.heard if isinstance(each, Ticked)]


class Beats(Carried):
    """Hears that a worker lives."""

    def beat(self, load: Load, num_steps: int) -> None:
        self.commands.put_nowait("beat")


async def test_a_worker_beats_and_ticks_while_a_long_step_runs() -> None:
    core, runner, outbox, inbox = OneStep(), HeldUp(), Beats(), Inbox()
    loop = WorkerLoop(core, runner.start, inbox, outbox, MonotonicClock(), 60.0)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(loop.run())
        assert await asyncio.to_thread(runner.started.wait, 10)
        for _ in range(3):
            await outbox.commands.get()
        assert not serving.done()
        runner.go_on.set()
        inbox.put(DrainAsked())
    assert len(core.ticks) >= 2
    assert all(tick.silent_s >= HEARTBEAT_S * 0.9 for tick in core.ticks)


async def test_a_step_that_hangs_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    core, runner, inbox = OneStep(), HeldUp(), Inbox()
    loop = WorkerLoop(core, runner.start, inbox, Beats(), MonotonicClock(), 0.1)
    ended: asyncio.Queue[int] = asyncio.Queue()
    monkeypatch.setattr("os._exit", ended.put_nowait)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(loop.run())
        assert await ended.get() == 70
        runner.go_on.set()
        inbox.put(DrainAsked())


def test_a_pulse_stops_when_its_loop_has_stood_still_for_too_long() -> None:
    pulse = LoopWatchdog(stalled_s=10.0, now_s=0.0)
    assert pulse.beat(9.0)
    pulse.turn(9.5)
    assert pulse.beat(19.0)
    assert not pulse.beat(19.6)


def test_a_silence_is_told_once() -> None:
    pulse = LoopWatchdog(stalled_s=100.0, now_s=0.0)
    for now_s in (0.5, 7.5, 8.0):
        pulse.beat(now_s)
    assert pulse.take_silence_s() == 7.0
    assert pulse.take_silence_s() == 0.0


def looks(watch: ThreadWatchdog, turns: list[int | None], since_s: float) -> list[bool]:
    """Look at each beat; return whether the thread was seen to go on."""
    return [watch.look(turn, since_s + HEARTBEAT_S * number) for number, turn in enumerate(turns, 1)]


def test_a_thread_that_does_not_come_round_for_too_long_hangs() -> None:
    assert looks(ThreadWatchdog(hung_s=2.0, now_s=0.0), [7, 7, 7, 7, 7, 7], 0.0) == [True] * 5 + [False]


def test_a_thread_that_comes_round_or_rests_does_not_hang() -> None:
    watch = ThreadWatchdog(hung_s=1.0, now_s=0.0)
    assert all(looks(watch, [1, 1, 2, 2, 3, 3, None, None, None, None, 3, 3], 0.0))


def test_time_in_which_the_process_was_frozen_is_not_its_threads() -> None:
    watch = ThreadWatchdog(hung_s=2.0, now_s=0.0)
    assert all(looks(watch, [7, 7], 0.0))
    assert watch.look(7, 500.0)
    assert looks(watch, [7, 7], 500.0) == [True, False]
