"""The turns of a worker: handle what came, plan, commit what a step brought. The live loop and simulators drive it.

Invariant: steps end in the order in which they began, at most MAX_IN_FLIGHT are under way, and each event and each step
is reported once.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from pdserve.engine.step import StepPlan, StepResult
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Command, DrainAsked, DrainCancelled, Event, Load, Placed

MAX_IN_FLIGHT = 2  # steps: one is computed while the results of the other are reported
REMEMBERED_S = 30.0  # after it a worker that has no work is tried again


class Performer(Protocol):
    """What carries out a worker's commands, and reports how full it is."""

    def perform(self, commands: Sequence[Command], step: tuple[StepPlan, StepResult] | None) -> None: ...

    def beat(self, load: Load, num_steps: int) -> None: ...

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None: ...


class Turns:
    """Scheduling is asynchronous where the core lets it be: the next step is planned as soon as one has begun."""

    def __init__(self, core: WorkerCore, performer: Performer) -> None:
        self._core = core
        self.steps: deque[StepPlan] = deque()  # under way, the oldest first
        self.num_steps = 0  # that have ended
        self._performer = performer
        self._failed_steps = FailedSteps()

    @property
    def drained(self) -> bool:
        return not self.steps and self._core.drained

    def handle(self, event: Event, now_s: float) -> None:
        """Take in one event. ProtocolError is the peer's and changes nothing."""
        self._performer.perform(self._core.handle(event, now_s), None)
        # Routers move answers away while these still decode, and the router that asked waits for this report.
        if isinstance(event, DrainAsked | DrainCancelled):
            self.beat(now_s)

    def note(self, events: Iterable[Event], now_s: float) -> None:
        """Report how full this worker is, if what was just handled brought it work."""
        if any(isinstance(event, Placed) for event in events):
            self._performer.refresh(lambda: self.load(now_s), self.num_steps, at_once=True)

    def next_step(self, now_s: float) -> StepPlan | None:
        """Return a step that begins now, behind those under way; None if none does."""
        if len(self.steps) >= MAX_IN_FLIGHT or (self.steps and not self._core.may_plan_ahead):
            return None
        plan = self._core.plan(now_s)
        if plan is not None:
            self.steps.append(plan)
        return plan

    def end_step(self, result: StepResult, elapsed_s: float, now_s: float) -> None:
        """Take in what the oldest step brought, and report it. elapsed_s: all its time, not only the engine's."""
        plan = self.steps.popleft()
        self.num_steps += 1
        commands = self._core.commit(plan, result, now_s)
        # A step computed again in halves takes longer than others of its size: its time is not reported.
        step = None if result.failed else (plan, replace(result, elapsed_s=elapsed_s))
        self._performer.perform(commands, step)
        if self._failed_steps.note(plan, result, now_s):
            self.beat(now_s)  # before routers place more here
        self._performer.refresh(lambda: self.load(now_s), self.num_steps, at_once=False)

    def beat(self, now_s: float) -> None:
        self._performer.beat(self.load(now_s), self.num_steps)

    def load(self, now_s: float) -> Load:
        return replace(self._core.load(), failed_steps=self._failed_steps.count(now_s))


class FailedSteps:
    """Counts steps in a row in which every sequence failed."""

    def __init__(self) -> None:
        self._count = 0
        self._last_s = 0.0
        self._failed_before: Collection[int] = ()  # places in the last step

    def note(self, plan: StepPlan, result: StepResult, now_s: float) -> bool:
        """Note a step; return whether all of its sequences failed. Those that failed in the one before do not count."""
        wanted = [place for place, chunk in enumerate(plan.chunks) if chunk.previous not in self._failed_before]
        self._failed_before = result.failed
        if not wanted:
            return False
        all_failed = all(place in result.failed for place in wanted)
        self._count = self.count(now_s) + 1 if all_failed else 0
        self._last_s = now_s
        return all_failed

    def count(self, now_s: float) -> int:
        return self._count if now_s - self._last_s < REMEMBERED_S else 0
