"""The loop that every worker runs, around a core that notes what it is told, and an engine that can be held up."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from held_loop import LOAD, Carried, HeldUp, Notes
from lone_core import LoneCore, job
from worker_settings import settings_of

from pdserve.base.clock import MonotonicClock
from pdserve.base.ids import Attempt, RequestId
from pdserve.engine.sequence import Job
from pdserve.engine.step import StepPlan, StepResult
from pdserve.protocol.sampling import SamplingParams
from pdserve.worker.inbox import Inbox
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.messages import DrainAsked, DrainCancelled, Load, Placed, RouterRef, Ticked
from pdserve.worker.server import rules_of


async def test_what_comes_while_a_step_runs_is_answered_before_the_step_is_over() -> None:
    core, engine, inbox, carried = Notes(), HeldUp(), Inbox(), Carried()
    loop = asyncio.create_task(WorkerLoop(core, engine.start, inbox, carried, MonotonicClock(), 60.0).run())
    await asyncio.to_thread(engine.started.wait)
    inbox.put("news")
    assert await carried.commands.get() == "answer to news"
    assert core.heard == ["news"]
    engine.go_on.set()
    inbox.put("more")
    assert await carried.commands.get() == "answer to more"
    core.drained = True
    inbox.wake()
    await loop
    assert sorted(core.heard[1:]) == ["commit", "more"]


class Holding(Carried):
    """Holds something back until a time."""

    def __init__(self, due_s: float) -> None:
        super().__init__()
        self.due_s = due_s

    def send_due(self) -> None:
        self.due_s = inf
        self.commands.put_nowait("what was held back")


async def test_what_was_held_back_goes_while_a_step_runs() -> None:
    core, engine, inbox, clock = Notes(), HeldUp(), Inbox(), MonotonicClock()
    carried = Holding(clock.now_s() + 0.05)
    loop = asyncio.create_task(WorkerLoop(core, engine.start, inbox, carried, clock, 60.0).run())
    await asyncio.to_thread(engine.started.wait)
    assert await asyncio.wait_for(carried.commands.get(), 20) == "what was held back"
    assert core.heard == []
    core.drained = True
    engine.go_on.set()
    await loop


class Steady(Notes):
    """A core with three steps; `is_prompt`: none of them is planned before the one before it is over."""

    def __init__(self, *, is_prompt: bool) -> None:
        super().__init__()
        self.may_plan_ahead = not is_prompt

    def plan(self, now_s: float) -> StepPlan | None:
        if self.heard.count("plan") == 3:
            return None
        self.heard.append("plan")
        return StepPlan(())

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[str]:
        super().commit(plan, result, now_s)
        self.drained = self.heard.count("commit") == 3
        return []


@pytest.mark.parametrize("is_prompt", [False, True])
async def test_while_a_worker_only_decodes_the_next_step_is_started_before_one_is_over(is_prompt: bool) -> None:
    core, engine, inbox = Steady(is_prompt=is_prompt), HeldUp(), Inbox()
    engine.go_on.set()
    await WorkerLoop(core, engine.start, inbox, Carried(), MonotonicClock(), 60.0).run()
    ahead = ["plan", "plan", "commit", "plan", "commit", "commit"]
    assert core.heard == (["plan", "commit"] * 3 if is_prompt else ahead)


class Drains(Notes):
    """A core that drains when it is asked to, and has much to finish."""

    draining = False

    def load(self) -> Load:
        return replace(LOAD, draining=self.draining)

    def handle(self, event: DrainAsked | DrainCancelled | Ticked, now_s: float) -> list[str]:
        if isinstance(event, Ticked):
            return []
        self.draining = isinstance(event, DrainAsked)
        return ["drain" if self.draining else "undrain"]


class Beating(Carried):
    """Notes what heartbeats report of a drain, once one has been asked for."""

    def beat(self, load: Load, num_steps: int) -> None:
        if not self.commands.empty():
            self.commands.put_nowait("draining" if load.draining else "taking work")


async def test_routers_learn_at_once_of_a_drain_and_of_its_end_while_a_step_runs() -> None:
    core, engine, inbox, carried = Drains(), HeldUp(), Inbox(), Beating()
    loop = asyncio.create_task(WorkerLoop(core, engine.start, inbox, carried, MonotonicClock(), 60.0).run())
    await asyncio.to_thread(engine.started.wait)
    for event in (DrainAsked(), DrainCancelled()):
        inbox.put(event)
    seen = [await carried.commands.get()]
    while not carried.commands.empty():  # before the next heartbeat
        seen.append(carried.commands.get_nowait())
    engine.go_on.set()
    core.drained = True
    inbox.wake()
    await loop
    assert seen == ["drain", "draining", "undrain", "taking work"], "a router waits for the drain that it asked for"


class Broken(Notes):
    """A core whose own code is wrong about what it hears."""

    def handle(self, event: str | Ticked, now_s: float) -> list[str]:
        if isinstance(event, str):
            raise KeyError(event)
        return []


async def test_a_broken_core_ends_its_process_and_is_never_taken_for_a_broken_step() -> None:
    core, engine, inbox = Broken(), HeldUp(), Inbox()
    loop = asyncio.create_task(WorkerLoop(core, engine.start, inbox, Carried(), MonotonicClock(), 60.0).run())
    await asyncio.to_thread(engine.started.wait)
    inbox.put("news")
    try:
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(loop, 5.0)  # while the step runs: nobody may be given the pages that it writes to
    finally:
        engine.go_on.set()
    assert [type(each) for each in caught.value.exceptions] == [KeyError]
    assert core.heard == []


class Counting(Carried):
    """Notes how often routers would be told the load."""

    def __init__(self) -> None:
        super().__init__()
        self.refreshed = 0

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        self.refreshed += at_once


class Placing(Notes):
    """A core that is told of placements, and drains after the last."""

    def handle(self, event: Placed | Ticked, now_s: float) -> list[str]:
        if isinstance(event, Placed):
            self.heard.append("placed")
            self.drained = len(self.heard) == 50
        return []


@pytest.mark.parametrize(("fills_steps_ahead", "num_ahead"), [(True, 2), (False, 0)])
def test_prompts_are_planned_ahead_where_launching_counts_and_they_fill_the_next_step(
    fills_steps_ahead: bool, num_ahead: int
) -> None:
    worker = LoneCore(num_pages=16, max_model_len=64, step_tokens=8, fills_steps_ahead=fills_steps_ahead)
    worker.place(job(1, 30))
    ahead, running = [], deque([worker.core.plan(0.0)])
    while running:
        ahead.append(worker.core.may_plan_ahead)
        if ahead[-1] and len(running) < 2:
            running.append(worker.core.plan(0.0))
        plan = running.popleft()
        assert plan is not None
        worker.core.commit(plan, worker.runner.run(plan), 0.0)
        if not running and worker.scheduler.running[0].num_missing > 1:
            running.append(worker.core.plan(0.0))
    assert sum(ahead) == num_ahead, "8, 8 and 8 of 30 tokens; the last 6 leave room for what comes"
    assert worker.scheduler.running[0].num_missing == 1


@pytest.mark.parametrize("has_stages", [True, False])
def test_prompts_that_wait_are_planned_ahead_for_pipeline_stages_alone(has_stages: bool) -> None:
    worker = LoneCore(num_pages=16, max_model_len=64, step_tokens=8, fills_steps_ahead=True, has_stages=has_stages)
    for number in range(1, 5):
        worker.place(job(number, 6))
    assert worker.core.plan(0.0) is not None
    assert worker.core.may_plan_ahead == has_stages, "8 of 24 tokens run, and the other prompts wait"


@pytest.mark.parametrize(
    ("options", "fills_steps_ahead", "has_stages"),
    [({}, False, False), ({"device": "cuda"}, True, False), ({"pipeline_parallel_size": 2}, True, True)],
)
def test_workers_plan_prompts_ahead_on_gpus_and_in_stages(
    tmp_path: Path, options: dict[str, object], fills_steps_ahead: bool, has_stages: bool
) -> None:
    rules = rules_of(settings_of(tmp_path, role="mixed", **options), 1)
    assert (rules.fills_steps_ahead, rules.has_stages) == (fills_steps_ahead, has_stages)


async def test_placements_that_come_together_are_told_to_other_routers_once() -> None:
    core, engine, inbox, carried = Placing(), HeldUp(), Inbox(), Counting()
    engine.go_on.set()
    job = Job(RequestId(bytes(16)), Attempt(0), (1,), 1, SamplingParams(), (0,))
    for _ in range(50):
        inbox.put(Placed(RouterRef(1), job, 1e9, None))
    await WorkerLoop(core, engine.start, inbox, carried, MonotonicClock(), 60.0).run()
    assert (core.heard.count("placed"), carried.refreshed) == (50, 1)


def test_steps_are_planned_ahead_where_all_sequences_decode_whatever_their_tokens_depend_on() -> None:
    worker = LoneCore(step_tokens=4)
    worker.place(job(1, 6))
    worker.step()
    assert not worker.core.may_plan_ahead, "the rest of a prompt is to be computed"
    worker.step()
    assert worker.core.may_plan_ahead
    worker.place(job(2, 3))
    assert not worker.core.may_plan_ahead, "a prompt waits"
    worker.step()
    assert worker.core.may_plan_ahead
    penalized = job(3, 2)
    worker.place(replace(penalized, params=replace(penalized.params, presence_penalty=1.0)))
    worker.step()
    assert worker.core.may_plan_ahead
