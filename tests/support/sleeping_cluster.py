"""A real launcher whose workers only sleep: what the launcher's clients do to it shows, and nothing is loaded."""

import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from supervised_children import Record, supervised

from pdserve.base.clock import MonotonicClock
from pdserve.launch import plan as plan_module
from pdserve.launch.folder import ProcessState, write_secret
from pdserve.launch.plan import ClusterSpec, Wiring
from pdserve.launch.service import LauncherEndpoint, serving
from pdserve.launch.supervisor import Backoff, Supervisor
from pdserve.net.operator_client import LauncherClient

SLEEPER = (sys.executable, "-I", "-c", "import signal; signal.pause()")


def let_workers_run(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes started from now on run a command in place of pdserve."""
    monkeypatch.setattr(plan_module, "PDSERVE", command)


@contextmanager
def deaf_workers() -> Iterator[None]:
    """Have processes that are started in the block end by SIGKILL alone: SIGTERM is blocked from their beginning."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class SleepingCluster:
    """A launcher, and what it announced."""

    address: str
    secret_file: Path
    client: LauncherClient
    supervisor: Supervisor
    record: Record
    ready: set[str] = field(default_factory=set)  # workers that are as good as ready

    def pid_of(self, name: str) -> int | None:
        """Return a process's id; None while it does not run."""
        return next((each.pid for each in self.supervisor.processes if each.name == name), None)

    async def states(self) -> dict[str, int]:
        """Return the workers' states by their names."""
        return {worker.worker_id: worker.state for worker in await self.client.list_workers()}


@asynccontextmanager
async def sleeping_cluster(folder: Path, max_workers: int) -> AsyncIterator[SleepingCluster]:
    """Run a router, prefill-0 and decode-0 for the length of the block."""
    spec = ClusterSpec("m", "m", max_workers=max_workers)
    wiring = Wiring(spec, public_port=1, internal_port=2, secret_file=write_secret(folder))
    ready, record = set[str](), Record()
    backoff = Backoff(first_s=0.05)
    supervisor = Supervisor(wiring.children(), folder, MonotonicClock(), backoff=backoff)

    def is_ready(process: ProcessState) -> bool:
        return process.name in ready

    endpoint = LauncherEndpoint(supervisor, wiring, is_ready)
    async with serving(endpoint, wiring.secret_file) as address, supervised(supervisor, record):
        client = LauncherClient(address, wiring.secret_file)
        await record.until(lambda: record.num_starts == 3)
        yield SleepingCluster(address, wiring.secret_file, client, supervisor, record, ready)
