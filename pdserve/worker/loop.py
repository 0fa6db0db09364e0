"""Drives a worker's core: the only place where its clock, its engine and the network meet."""

import asyncio
import logging
from collections import deque

from pdserve.base.clock import Clock
from pdserve.base.errors import DeviceError, ProtocolError
from pdserve.base.processes import DEVICE_EXIT_STATUS
from pdserve.engine.step import StepResult
from pdserve.executor.executor import StartStep
from pdserve.kvtransfer.doors import HEARTBEAT_S
from pdserve.worker.core import WorkerCore
from pdserve.worker.inbox import Inbox
from pdserve.worker.messages import Due, Event, Placed, Ticked
from pdserve.worker.outbox import Outbox
from pdserve.worker.turns import Turns
from pdserve.worker.watchdog import HUNG_EXIT_STATUS, LoopWatchdog, end_process

logger = logging.getLogger(__name__)


class WorkerLoop:
    """Takes a worker's turns: what comes while a step runs is handled at once."""

    def __init__(
        self, core: WorkerCore, start_step: StartStep, inbox: Inbox, outbox: Outbox, clock: Clock, stalled_step_s: float
    ) -> None:
        self._core = core
        self._turns = Turns(core, outbox)
        self._start_step = start_step
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._running: deque[asyncio.Future[StepResult]] = deque()  # parallel to the steps under way
        self._has_worked = False  # since a heartbeat reported that nothing was left
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
            self._turns.beat(now_s)
            self._inbox.put(Ticked(self._watchdog.take_silence_s()))

    async def _serve(self) -> None:
        while not self._turns.drained:
            self._watchdog.turn(self._clock.now_s())
            self._take_in()
            self._start_steps()
            if not self._running:
                self._rest()
                await self._wait()
                self._began_s = self._clock.now_s()
                continue
            step = self._running[0]
            await self._until_done(step)
            self._running.popleft()
            try:
                result = step.result()
            except DeviceError as error:
                end_process(DEVICE_EXIT_STATUS, f"the device is broken: {error}")
                raise
            self._take_step(result)
        self._turns.beat(self._clock.now_s())

    def _start_steps(self) -> None:
        """Start a step if there is one, and one ahead of it where the core lets it be."""
        while (plan := self._turns.next_step(self._clock.now_s())) is not None:
            step = asyncio.wrap_future(self._start_step(plan))
            step.add_done_callback(lambda _: self._inbox.wake())
            self._running.append(step)

    async def _until_done(self, step: asyncio.Future[StepResult]) -> None:
        """Handle what comes until a step is over."""
        while not step.done():
            await self._wait()
            self._take_in()

    async def _wait(self) -> None:
        """Wait for an event, or for the next time at which there is something to do."""
        await self._inbox.wait(max(0.0, min(self._core.due_s, self._outbox.due_s) - self._clock.now_s()))

    def _take_step(self, result: StepResult) -> None:
        began_s, self._began_s = self._began_s, self._clock.now_s()
        self._has_worked = True
        self._turns.end_step(result, self._began_s - began_s, self._began_s)

    def _rest(self) -> None:
        """Report at once, not with the next heartbeat, that everything this worker had to do is done."""
        if self._has_worked and self._core.idle:
            self._has_worked = False
            self._turns.beat(self._clock.now_s())

    def _take_in(self) -> None:
        events, now_s = self._inbox.drain(), self._clock.now_s()
        if self._core.due_s <= now_s:
            events.append(Due())
        if self._outbox.due_s <= now_s:
            self._outbox.send_due()
        for event in events:
            self._handle(event)
        self._turns.note(events, self._clock.now_s())

    def _handle(self, event: Event) -> None:
        if isinstance(event, Placed):
            self._outbox.expect(event)
        try:
            self._turns.handle(event, self._clock.now_s())
        except ProtocolError as error:
            self._outbox.refuse(error.refusal)
            logger.warning("refused %s: %s", type(event).__name__, error)
        else:
            self._has_worked |= not isinstance(event, Ticked)
