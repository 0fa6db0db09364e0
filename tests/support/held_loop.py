"""What a worker's loop runs around: a core with one step, an engine that can be held up, and notes of what is done."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf

from pdserve.base.errors import PeerFault
from pdserve.base.roles import Role
from pdserve.engine.step import StepPlan, StepResult
from pdserve.worker.load import Claim
from pdserve.worker.messages import Load, Placed, Ticked

LOAD = Load(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, draining=False, role=Role.DECODE, role_epoch=0)


class Notes:
    """A core with one step to plan; it drains when told to."""

    due_s = inf
    may_plan_ahead = True

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.drained = False
        self.idle = True
        self.has_planned = False

    def load(self) -> Load:
        return LOAD

    def claims(self) -> tuple[Claim, ...]:
        return ()

    def handle(self, event: object, now_s: float) -> list[str]:
        if isinstance(event, Ticked):
            return []
        self.heard.append(event)
        return [f"answer to {event}"]

    def plan(self, now_s: float) -> StepPlan | None:
        if self.has_planned:
            return None
        self.has_planned = True
        return StepPlan(())

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[str]:
        self.heard.append("commit")
        return []


class HeldUp:
    """An engine whose step lasts until it is let go."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.started = threading.Event()
        self.go_on = threading.Event()

    def start(self, plan: StepPlan) -> Future[StepResult]:
        return self.thread.submit(self.run, plan)

    def run(self, plan: StepPlan) -> StepResult:
        self.started.set()
        self.go_on.wait(20)
        return StepResult((), 0.0)


class Carried:
    """Commands in the order they were carried out, and a signal for each."""

    due_s = inf  # nothing is held back

    def __init__(self) -> None:
        self.commands: asyncio.Queue[str] = asyncio.Queue()

    def perform(self, commands: Sequence[str], step: tuple[StepPlan, StepResult] | None) -> None:
        for command in commands:
            self.commands.put_nowait(command)

    def expect(self, placed: Placed) -> None:
        pass

    def beat(self, load: Load, num_steps: int) -> None:
        pass

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        pass

    def refuse(self, refusal: PeerFault) -> None:
        pass
