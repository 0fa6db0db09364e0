"""When a worker says that it lives: while steps run too, but not while one hangs."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf

import pytest

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import PeerFault
from pdserve.base.roles import Role
from pdserve.engine.step import StepPlan, StepResult
from pdserve.kvtransfer.doors import HEARTBEAT_S
from pdserve.worker.inbox import Inbox
from pdserve.worker.load import Claim
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.messages import DrainAsked, Load, Ticked
from pdserve.worker.watchdog import LoopWatchdog, ThreadWatchdog

PLAN = StepPlan((), ())
NOTHING = Load(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, draining=False, role=Role.DECODE, role_epoch=0)
Event = Ticked | DrainAsked


class OneStep:
    """A core with one step to compute, drained when asked."""

    due_s = inf
    may_plan_ahead = True

    def __init__(self) -> None:
        self.drained = False
        self.idle = True
        self.ticks: list[Ticked] = []
        self._plans = [PLAN]

    def load(self) -> Load:
        return NOTHING

    def claims(self) -> tuple[Claim, ...]:
        return ()

    def handle(self, event: Event, now_s: float) -> list[str]:
        if isinstance(event, Ticked):
            self.ticks.append(event)
        else:
            self.drained = True
        return []

    def plan(self, now_s: float) -> StepPlan | None:
        return self._plans.pop() if self._plans else None

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[str]:
        return []


class HeldRunner:
    """An engine whose step ends when a test lets it."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def start(self, plan: StepPlan) -> Future[StepResult]:
        return self._thread.submit(self.run, plan)

    def run(self, plan: StepPlan) -> StepResult:
        self.begun.set()
        self.may_end.wait(20)
        return StepResult((), 0.0)


class Beats:
    """Hears that a worker lives."""

    due_s = inf  # nothing is held back

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Load] = asyncio.Queue()

    def perform(self, commands: Sequence[str], step: tuple[StepPlan, StepResult] | None) -> None:
        pass

    def beat(self, load: Load, num_steps: int) -> None:
        self.heard.put_nowait(load)

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        pass

    def refuse(self, refusal: PeerFault) -> None:
        pass


async def test_a_worker_beats_and_ticks_while_a_long_step_runs() -> None:
    core, runner, outbox, inbox = OneStep(), HeldRunner(), Beats(), Inbox()
    loop = WorkerLoop(
        core,
        runner.start,
        inbox,
        outbox,
        MonotonicClock(),
        60.0,
    )
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(loop.run())
        assert await asyncio.to_thread(runner.begun.wait, 10)
        for _ in range(3):
            await outbox.heard.get()
        assert not serving.done()
        runner.may_end.set()
        inbox.put(DrainAsked())
    assert len(core.ticks) >= 2
    assert all(tick.silent_s >= HEARTBEAT_S * 0.9 for tick in core.ticks)


async def test_a_step_that_hangs_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    core, runner, inbox = OneStep(), HeldRunner(), Inbox()
    loop = WorkerLoop(
        core,
        runner.start,
        inbox,
        Beats(),
        MonotonicClock(),
        0.1,
    )
    ended: asyncio.Queue[int] = asyncio.Queue()
    monkeypatch.setattr("os._exit", ended.put_nowait)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(loop.run())
        assert await ended.get() == 70
        runner.may_end.set()
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
