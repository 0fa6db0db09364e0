"""Drives a worker's core: the only place where its clock, its engine and the network meet."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from pdserve.clock import Clock
from pdserve.engine.step import StepPlan, StepResult
from pdserve.errors import DeviceError, ProtocolError
from pdserve.kvtransfer.doors import HEARTBEAT_S
from pdserve.worker.core import WorkerCore
from pdserve.worker.failing import FailedSteps
from pdserve.worker.inbox import Inbox
from pdserve.worker.messages import DrainAsked, DrainCancelled, Due, Event, Load, Placed, Ticked
from pdserve.worker.outbox import Outbox
from pdserve.worker.watchdog import DEVICE_EXIT_STATUS, HUNG_EXIT_STATUS, LoopWatchdog, end_process

logger = logging.getLogger(__name__)

# Computes in another thread, in the order of the calls. A request that fails is part of the result.
StartStep = Callable[[StepPlan], asyncio.Future[StepResult]]
MAX_IN_FLIGHT = 2  # steps: one is computed while the results of the other are reported


class WorkerLoop:
    """Handle what came, plan, run, commit; what comes while a step runs is handled at once.

    Scheduling is asynchronous while a worker only decodes: the next step is planned as soon as one has begun, so
    that the engine goes from step to step without waiting for this loop.
    """

    def __init__(
        self,
        core: WorkerCore,
        start_step: StartStep,
        inbox: Inbox,
        outbox: Outbox,
        clock: Clock,
        stalled_step_s: float,
    ) -> None:
        self._core = core
        self._start_step = start_step
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._running: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
        self._num_steps = 0
        self._has_worked = False  # since a heartbeat reported that nothing was left
        self._failed_steps = FailedSteps()
        self._began_s = clock.now_s()
        self._watchdog = LoopWatchdog(stalled_step_s, clock.now_s())

    async def run(self) -> None:
        """Serve until the core has drained. What a step raises ends this process, and so does a step that hangs."""
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._keep_beating(), name="heartbeat")
            try:
                await self._serve()
            finally:
                beating.cancel()

    async def _keep_beating(self) -> None:
        """Send heartbeats and tick the core, while steps run too."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now_s = self._clock.now_s()
            if not self._watchdog.beat(now_s):
                end_process(HUNG_EXIT_STATUS, "a step hangs")
            self._beat()
            self._inbox.put(Ticked(self._watchdog.take_silence_s()))

    async def _serve(self) -> None:
        while self._running or not self._core.drained:
            self._watchdog.turn(self._clock.now_s())
            self._take_in()
            self._start_steps()
            if not self._running:
                self._rest()
                await self._wait()
                self._began_s = self._clock.now_s()
                continue
            plan, step = self._running[0]
            await self._until_done(step)
            self._running.popleft()
            try:
                result = step.result()
            except DeviceError as error:
                end_process(DEVICE_EXIT_STATUS, f"the device is broken: {error}")
                raise
            self._take_step(plan, result)
        self._beat()

    def _start_steps(self) -> None:
        """Start a step if there is one, and one ahead of it where this worker only decodes."""
        while len(self._running) < MAX_IN_FLIGHT and (not self._running or self._core.may_plan_ahead):
            plan = self._core.plan(self._clock.now_s())
            if plan is None:
                return
            step = self._start_step(plan)
            step.add_done_callback(lambda _: self._inbox.wake())
            self._running.append((plan, step))

    async def _until_done(self, step: asyncio.Future[StepResult]) -> None:
        """Handle what comes until a step is over."""
        while not step.done():
            await self._wait()
            self._take_in()

    async def _wait(self) -> None:
        """Wait for an event, or for the next time at which there is something to do."""
        await self._inbox.wait(max(0.0, min(self._core.due_s, self._outbox.due_s) - self._clock.now_s()))

    def _take_step(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what a step brought, and report it with all its time, not only the engine's."""
        began_s, self._began_s = self._began_s, self._clock.now_s()
        self._num_steps += 1
        self._has_worked = True
        commands = self._core.commit(plan, result, self._began_s)
        # A step computed again in halves takes longer than others of its size: its time is not reported.
        step = None if result.failed else (plan, replace(result, elapsed_s=self._began_s - began_s))
        self._outbox.perform(commands, step)
        if self._failed_steps.note(plan, result, self._began_s):
            self._beat()  # before routers place more here
        self._outbox.refresh(self._load, self._num_steps, at_once=False)

    def _beat(self) -> None:
        self._outbox.beat(self._load(), self._num_steps)

    def _load(self) -> Load:
        return replace(self._core.load(), failed_steps=self._failed_steps.count(self._clock.now_s()))

    def _rest(self) -> None:
        """Report at once, not with the next heartbeat, that everything this worker had to do is done."""
        if self._has_worked and self._core.idle:
            self._has_worked = False
            self._beat()

    def _take_in(self) -> None:
        events, now_s = self._inbox.drain(), self._clock.now_s()
        if self._core.due_s <= now_s:
            events.append(Due())
        if self._outbox.due_s <= now_s:
            self._outbox.send_due()
        for event in events:
            self._handle(event)
        if any(isinstance(event, Placed) for event in events):
            self._outbox.refresh(self._load, self._num_steps, at_once=True)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Placed):
            self._outbox.expect(event)
        try:
            commands = self._core.handle(event, self._clock.now_s())
        except ProtocolError as error:
            self._outbox.refuse(error.refusal)
            logger.warning("refused %s: %s", type(event).__name__, error)
            return
        self._has_worked |= not isinstance(event, Ticked)
        self._outbox.perform(commands, None)
        # Routers move answers away while these still decode, and the router that asked waits for this report.
        if isinstance(event, DrainAsked | DrainCancelled):
            self._beat()
