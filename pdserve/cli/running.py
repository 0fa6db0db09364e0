"""Run a local cluster in the foreground: progress while it loads, one line when it is ready, drain on Ctrl-C."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from pdserve.cli.failure import CommandError
from pdserve.launch.local import LaunchError, Listener, LocalCluster, running
from pdserve.launch.plan import ClusterSpec
from pdserve.launch.state import write_atomically
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link


class Terminal:
    """What a cluster's operator sees: a bar for each worker that loads, then notices."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.status = admin.ClusterStatus()
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    @property
    def listener(self) -> Listener:
        """The terminal as a cluster's listener."""
        return Listener(on_status=self._on_status, on_notice=self.notice)

    def notice(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Show the workers' progress for the length of the block."""
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as self._progress:
            self._bars = {"cluster": self._progress.add_task("starting processes", total=None)}
            yield
        self._progress = None

    def _on_status(self, status: admin.ClusterStatus) -> None:
        self.status = status
        if self._progress is None:
            return
        for worker in status.workers:
            name = worker.registration.worker_id
            share = 1.0 if worker.registration.ready else worker.registration.load_progress
            if name not in self._bars:
                self._bars[name] = self._progress.add_task(f"{name} loads the model", total=1.0)
            self._progress.update(self._bars[name], completed=share)


async def until_ready(cluster: LocalCluster, terminal: Terminal, stopping: asyncio.Event) -> bool:
    """Wait for the cluster, showing its progress. False when asked to stop before it was ready."""
    waits = [asyncio.create_task(event.wait()) for event in (cluster.ready, stopping)]
    try:
        with terminal.loading():
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return cluster.ready.is_set()


async def serve_until_signal(spec: ClusterSpec, terminal: Terminal, ready_file: Path | None) -> None:
    """Run a cluster until SIGINT or SIGTERM; the first lets requests finish, a second one kills."""
    stopping = asyncio.Event()
    try:
        async with running(spec, terminal.listener) as cluster:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, _on_signal, cluster, stopping)
            if await until_ready(cluster, terminal, stopping):
                if ready_file is not None:
                    write_atomically(ready_file, cluster.state.model_dump_json(indent=2) + "\n")
                terminal.notice(f"{ready_line(cluster, terminal.status)} | Ctrl-C stops")
                await stopping.wait()
            terminal.notice("stopping: running requests may finish; Ctrl-C again ends them")
    except LaunchError as error:
        raise CommandError(str(error)) from error


def _on_signal(cluster: LocalCluster, stopping: asyncio.Event) -> None:
    if stopping.is_set():
        cluster.kill()
    stopping.set()


def ready_line(cluster: LocalCluster, status: admin.ClusterStatus) -> str:
    """Return where a cluster is reached and what it consists of, in one line."""
    state = cluster.state
    pools = " + ".join(
        _pool(name, [w.registration for w in status.workers if w.registration.role == role])
        for name, role in (("prefill", link.ROLE_PREFILL), ("decode", link.ROLE_DECODE))
    )
    return f"ready: {state.model} at {state.endpoint} (gRPC) | {pools}"


def _pool(name: str, workers: list[link.Register]) -> str:
    num_pages = sum(worker.num_pages for worker in workers)
    page_size = workers[0].layout.page_size if workers else 0
    return f"{len(workers)} {name}, {num_pages} pages of {page_size} tokens"
