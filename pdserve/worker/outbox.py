"""Carries out what a worker's core decides."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdserve.base.clock import Clock
from pdserve.base.errors import PeerFault
from pdserve.engine.step import StepPlan, StepResult
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.client import HandoffClient
from pdserve.kvtransfer.ranked_mover import AnyMover
from pdserve.kvtransfer.server import HandoffServicer
from pdserve.kvtransfer.speed import Probes
from pdserve.worker.messages import Command, Failed, Load, Placed, Progress, PromptScored, Report, RoleTaken, Tokens
from pdserve.worker.reporting import Reporter
from pdserve.worker.spans import TaskSpans
from pdserve.worker.watchdog import HUNG_EXIT_STATUS, ThreadWatchdog, end_process

HUNG_MOVER_S = 60.0  # its thread comes round each millisecond, except while a call of the library runs


@dataclass(frozen=True, slots=True)
class Carriers:
    client: HandoffClient
    servicer: HandoffServicer
    mover: AnyMover
    probes: Probes

    async def close(self) -> None:
        """End the streams to receivers, once what is queued has been written."""
        self.probes.close()
        await self.client.close()


class Outbox:
    """Never blocks: what takes time comes back as an event. Each check of digests is in a thread."""

    def __init__(
        self,
        carriers: Carriers,
        reporter: Reporter,
        sink: doors.Sink[doors.DigestsChecked],
        tasks: asyncio.TaskGroup,
        clock: Clock,
        spans: TaskSpans | None = None,
    ) -> None:
        self._carriers = carriers
        self._reporter = reporter
        self._sink = sink
        self._tasks = tasks
        self._clock = clock
        self.spans = spans
        self._watchdogs = [ThreadWatchdog(HUNG_MOVER_S, clock.now_s()) for _ in carriers.mover.turns]

    def perform(self, commands: Sequence[Command], step: tuple[StepPlan, StepResult] | None) -> None:
        """Carry out commands. With the step that they came of, every router is sent what it cost."""
        reports: list[Report] = []
        for command in commands:
            match command:
                case Tokens() | PromptScored() | Progress() | Failed():
                    reports.append(command)
                case RoleTaken():
                    self._reporter.report_role(command)
                case _:
                    self._carry_out(command)
        self._reporter.send(reports, step)
        if self.spans is not None:
            self.spans.follow(reports, self._clock.now_s())

    def expect(self, placed: Placed) -> None:
        """Begin the spans of a job that the core is given next."""
        if self.spans is not None:
            self.spans.begin(placed, self._clock.now_s())

    def _carry_out(self, command: doors.Command) -> None:
        carriers = self._carriers
        match command:
            case doors.Connect(peer, address):
                carriers.client.connect(peer, address)
            case doors.ToReceiver(peer, key, message):
                carriers.client.send(peer, key, message)
            case doors.StartCopy(peer, key, src, dst):
                carriers.mover.write(peer, key, src, dst)
            case doors.CancelCopies(peer, key):
                carriers.mover.cancel(peer, key)
            case doors.Probe(peer):
                carriers.probes.start(peer)
            case doors.ToSender(peer, key, answer):
                carriers.servicer.send(peer, key, answer)
            case doors.CheckDigests():
                self._tasks.create_task(self._check(command), name="digests")
            case doors.Forget(peer):
                carriers.servicer.forget(peer)
                carriers.client.forget(peer)
                carriers.mover.forget(peer)
                carriers.probes.forget(peer)

    async def _check(self, check: doors.CheckDigests) -> None:
        mismatch = await asyncio.to_thread(self._carriers.mover.first_mismatch, check.pages, check.digests)
        self._sink.put(doors.DigestsChecked(check.key, mismatch))

    @property
    def due_s(self) -> float:
        """When `send_due` has something to send; inf: nothing waits."""
        return self._reporter.due_s

    def send_due(self) -> None:
        """Send routers what has been held back long enough."""
        self._reporter.send_due()

    def beat(self, load: Load, num_steps: int) -> None:
        """Send a heartbeat to routers and receivers."""
        for rank, (watchdog, turn) in enumerate(zip(self._watchdogs, self._carriers.mover.turns, strict=True)):
            if not watchdog.look(turn, self._clock.now_s()):
                end_process(HUNG_EXIT_STATUS, f"the mover's thread hangs (rank {rank})")
        self._carriers.client.beat()
        self._reporter.beat(self.with_stalled(load), num_steps)

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        """Report to routers how full this worker is, if that cannot wait for the next heartbeat."""
        self._reporter.refresh(lambda: self.with_stalled(load()), num_steps, at_once=at_once)

    def refuse(self, refusal: PeerFault) -> None:
        self._reporter.refuse(refusal)

    def with_stalled(self, load: Load) -> Load:
        return replace(load, num_stalled_peers=self._carriers.mover.num_stalled)
