"""Own one worker where no launcher runs: keep its process running, and report each of its ends to the router."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import CommandError
from pdserve.base.ids import Incarnation
from pdserve.launch.claim import Claim
from pdserve.launch.plan import ChildSpec
from pdserve.launch.supervisor import NEVER_STARTED, ChildExit, Supervisor, report_end
from pdserve.net.operator_client import AdminClient


@dataclass(frozen=True, slots=True)
class Order:
    """A worker to own."""

    spec: ChildSpec
    cluster: str
    router: str  # its internal port, host:port
    secret_file: Path  # on the machine where the worker runs
    end_within_s: float  # after it was asked to end


@dataclass(frozen=True, slots=True)
class OwnedWorker:
    """A worker, as its owner sees it."""

    worker_id: str
    incarnation: Incarnation
    pid: int | None  # None between its death and its next start, and after its end
    leaving: bool  # whether it ends for good, or has
    router: str  # that it serves
    refusal: str = ""  # why it does not start, if it refuses its configuration


class Owner:
    """Keeps one worker; `run` ends when the worker has ended for good and the router knows it."""

    def __init__(self, order: Order, log_dir: Path, environment: Mapping[str, str], claim: Claim) -> None:
        self._order, self._claim = order, claim
        self._last = OwnedWorker(order.spec.name, NEVER_STARTED, pid=None, leaving=False, router=order.router)
        self._supervisor = Supervisor((order.spec,), log_dir, MonotonicClock(), environment=environment)

    @property
    def worker(self) -> OwnedWorker:
        """The worker at this moment."""
        for process in self._supervisor.processes:
            incarnation = Incarnation(process.incarnation)
            self._last = replace(self._last, incarnation=incarnation, pid=process.pid, leaving=process.leaving)
            return self._last
        return replace(self._last, pid=None, leaving=True)

    def retire(self) -> None:
        """Let the worker drain and end; it is killed if it does not in its time."""
        if self._supervisor.processes:
            self._supervisor.retire(self._order.spec.name, self._order.end_within_s)

    async def run(self) -> None:
        """Keep the worker running until it is retired. An ExceptionGroup holds ConfigError if it refuses its flags."""
        router = AdminClient(self._order.router, self._order.secret_file)
        async with asyncio.TaskGroup() as reports:

            def on_exit(exit_: ChildExit) -> None:
                reports.create_task(report_end(router, exit_))

            await self._supervisor.run(on_exit, self._on_change)

    def _on_change(self) -> None:
        for process in self._supervisor.processes:
            if process.pid is not None:
                self._claim.note(process.pid)
        if not self._supervisor.processes:
            self._supervisor.kill()  # nothing is left to keep


def machine() -> str:
    """Return what names this machine since it was started, and the processes that can be seen from here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError as error:
        raise CommandError("workers are owned on Linux alone: elsewhere nothing ends them with their owner") from error
