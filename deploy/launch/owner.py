"""Own one worker where no launcher runs: keep its process running, and report each of its ends to the router.

Invariant: two processes of one worker never run at once on a machine, however earlier owners ended.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import CommandError
from pdserve.base.ids import Incarnation
from pdserve.launch.plan import ChildSpec
from pdserve.launch.supervisor import NEVER_STARTED, ChildExit, Supervisor, report_end
from pdserve.net.operator_client import AdminClient

OWNER = "PDSERVE_OWNER"  # variable of a worker's environment, by which a later owner finds its process


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

    def __init__(self, order: Order, log_dir: Path, environment: Mapping[str, str]) -> None:
        self._order = order
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
        if not self._supervisor.processes:
            self._supervisor.kill()  # nothing is left to keep


def machine() -> str:
    """Return what names this machine since it was started, and the processes that can be seen from here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError as error:
        raise CommandError("workers are owned on Linux alone: elsewhere nothing ends them with their owner") from error


def end_former(owner: str) -> None:
    """Kill the processes that an earlier owner of this name left on this machine; return once nothing of them runs."""
    while left := list(filter(partial(_is_of, owner), psutil.process_iter())):  # one may start ranks meanwhile
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                _wait(process)


def _is_of(owner: str, process: psutil.Process) -> bool:
    try:
        return process.environ().get(OWNER) == owner
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # it has ended, or is another user's


def _wait(process: psutil.Process) -> None:
    """Wait until a killed process runs no more. Whoever started it may never reap it: then a zombie is left."""
    while True:
        try:
            process.wait(0.05)
        except psutil.TimeoutExpired:
            if process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1:
                return
        else:
            return
