"""Carries out what a worker's core decides."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pdserve.clock import Clock
from pdserve.decode_worker.shell import IncomingShell
from pdserve.engine.step import StepPlan, StepResult
from pdserve.errors import Refusal
from pdserve.kvtransfer.doors import CheckDigests, Forget, ToSender
from pdserve.prefill_worker.shell import OutgoingShell
from pdserve.worker.ending import end_hung
from pdserve.worker.messages import Command, Failed, Load, Progress, Report, RoleTaken, Tokens
from pdserve.worker.reporting import Reporter
from pdserve.worker.watchdog import ThreadWatchdog

HUNG_MOVER_S = 60.0  # its thread is a millisecond from its next look, but for the time a library's call takes


class Outbox:
    """Never blocks: what takes time comes back as an event."""

    def __init__(self, outgoing: OutgoingShell, incoming: IncomingShell, reporter: Reporter, clock: Clock) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._reporter = reporter
        self._clock = clock
        self._watchdog = ThreadWatchdog(HUNG_MOVER_S, clock.now_s())

    def perform(self, commands: Sequence[Command], step: tuple[StepPlan, StepResult] | None) -> None:
        """Carry out commands. With the step that they came of, every router is sent what it cost."""
        reports: list[Report] = []
        for command in commands:
            match command:
                case Tokens() | Progress() | Failed():
                    reports.append(command)
                case RoleTaken():
                    self._reporter.report_role(command)
                case ToSender() | CheckDigests():
                    self._incoming.perform(command)
                case Forget():
                    self._incoming.perform(command)
                    self._outgoing.perform(command)
                case _:
                    self._outgoing.perform(command)
        self._reporter.send(reports, step)

    def beat(self, load: Load, num_steps: int) -> None:
        """Tell routers and receivers that this worker lives."""
        if not self._watchdog.look(self._outgoing.mover.turn, self._clock.now_s()):
            end_hung("the mover's thread")
        self._outgoing.client.beat()
        self._reporter.beat(self.with_stalled(load), num_steps)

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        """Report to routers how full this worker is, if that cannot wait for the next heartbeat."""
        self._reporter.refresh(lambda: self.with_stalled(load()), num_steps, at_once=at_once)

    def refuse(self, refusal: Refusal) -> None:
        """Count what was refused."""
        self._reporter.refuse(refusal)

    def with_stalled(self, load: Load) -> Load:
        """Return a load with what the mover knows of its peers."""
        return replace(load, num_stalled_peers=self._outgoing.mover.num_stalled)
