"""Run a local cluster in the foreground: progress while it loads, one line when it is ready, drain on Ctrl-C."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from pdserve.base.errors import CommandError
from pdserve.base.processes import exit_status
from pdserve.base.signals import Request, StopRequests, end_after, end_after_kill, end_on_signals, heeded_signals
from pdserve.cli.stream import add_message, ask, ledger_line
from pdserve.launch.local import END_ELSEWHERE_S, Listener, LocalCluster
from pdserve.launch.plan import ClusterSpec
from pdserve.launch.service import WORKERS_END_S
from pdserve.launch.several import longest_drain_s, running_all
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.link import ROLES, paging_from_proto

DEMO_TOKENS = 64
KILL_LIMIT_S = 5.0  # for processes that were killed to end; one that hangs in a driver does not
STOP_LIMIT_S = WORKERS_END_S + 0.5  # after drain_timeout_s: when this process ends, and its children with it


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Say no more: rich would end this process, and with it the cluster."""
        self.quiet = True


class Terminal:
    """What a cluster's operator sees: a bar for each worker that loads, then notices.

    The cluster goes on where nobody reads them any more.
    """

    def __init__(self) -> None:
        self.console: Console = _Console(stderr=True, highlight=False)
        self.statuses: dict[str, admin.ClusterStatus] = {}  # by cluster
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    def listener(self, cluster: str, *, is_alone: bool = True) -> Listener:
        """Return what shows a cluster's progress and notices, with its name unless it is alone."""
        prefix = "" if is_alone else f"{cluster}: "
        return Listener(
            on_status=partial(self._on_status, cluster, prefix), on_notice=lambda text: self.notice(f"{prefix}{text}")
        )

    def notice(self, text: str) -> None:
        with suppress(OSError):  # a full disk, or a terminal that is gone
            if self._progress is not None:
                self.console.print(text, markup=False, soft_wrap=True)
                return
            sys.stderr.write(f"{text}\n")  # rich would keep what cannot be written, and write it again each time
            sys.stderr.flush()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Show the workers' progress for the length of the block: bars, or a line where there is no terminal."""
        if not self.console.is_terminal:
            self.notice("starting processes")
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as self._progress:
            self._bars = {"cluster": self._progress.add_task("starting processes", total=None)}
            yield
        self._progress = None

    def _on_status(self, cluster: str, prefix: str, status: admin.ClusterStatus) -> None:
        self.statuses[cluster] = status
        if self._progress is None:
            return
        for worker in status.workers:
            name = f"{prefix}{worker.registration.worker_id}"
            share = 1.0 if worker.registration.ready else worker.registration.load_progress
            if name not in self._bars:
                self._bars[name] = self._progress.add_task(f"{name} loads the model", total=1.0)
            self._progress.update(self._bars[name], completed=share)


class Stop:
    """What signals do to clusters: once one of them is ready the first signal drains them, any other kills them."""

    def __init__(self, clusters: Sequence[LocalCluster], limit_s: float, kill_limit_s: float = KILL_LIMIT_S) -> None:
        """Listen to signals in the running loop. This process ends where a drain, or a kill, lasts beyond its limit."""
        self.asked = asyncio.Event()
        self._clusters = clusters
        self._limit_s, self._kill_limit_s = limit_s, kill_limit_s
        self._requests = StopRequests()
        self.killed_by: signal.Signals | None = None
        for number in heeded_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def _receive(self, number: signal.Signals) -> None:
        request = self._requests.receive(asyncio.get_running_loop().time(), number)
        if request is Request.SECOND or not any(cluster.ready.is_set() for cluster in self._clusters):
            self.killed_by = number
            for cluster in self._clusters:
                cluster.kill()
            end_after_kill(number, self._kill_limit_s)
        elif request is Request.FIRST:
            end_after(self._limit_s)
        self.asked.set()

    def exit_if_killed(self) -> None:
        """Raise SystemExit where a signal ended the cluster without a drain."""
        if self.killed_by is not None:
            raise SystemExit(exit_status(self.killed_by))


@asynccontextmanager
async def until_signal(
    specs: Sequence[ClusterSpec], terminal: Terminal
) -> AsyncIterator[tuple[tuple[LocalCluster, ...], Stop]]:
    """Run the clusters of models for the length of the block, which is to end when a signal asks for it.

    Raises LaunchError where one cannot be brought up, SystemExit where they were killed by a signal.
    """
    end_on_signals()
    async with running_all(specs, partial(terminal.listener, is_alone=len(specs) == 1)) as clusters:
        limit_s = sum(spec.drain_timeout_s + STOP_LIMIT_S for spec in specs)  # they drain one after the other
        if len(specs) > 1:
            limit_s += longest_drain_s(specs) + STOP_LIMIT_S  # their frontends do so first
        if specs[0].elsewhere:
            limit_s += specs[0].drain_timeout_s + END_ELSEWHERE_S
        stop = Stop(clusters, limit_s)
        yield clusters, stop
    stop.exit_if_killed()


async def until_ready(clusters: Sequence[LocalCluster], terminal: Terminal, stop: Stop) -> bool:
    """Wait for the clusters, showing their progress. False when asked to stop before all were ready."""

    async def all_are_ready() -> None:
        for cluster in clusters:
            await cluster.ready.wait()

    with terminal.loading():
        await first_of(all_are_ready(), stop.asked.wait())
    return not stop.asked.is_set()


async def first_of(*waits: Coroutine[object, object, object]) -> None:
    """Run these until one of them has ended, and cancel the others; what one raises is raised."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


async def serve_until_signal(specs: Sequence[ClusterSpec], terminal: Terminal) -> None:
    """Run the clusters of models until a signal stops them; the first lets requests finish, a second one kills."""
    async with until_signal(specs, terminal) as (clusters, stop):
        if await until_ready(clusters, terminal, stop):
            lines = [ready_line(cluster, terminal.statuses[cluster.state.name]) for cluster in clusters]
            terminal.notice(f"{chr(10).join(lines)} | Ctrl-C stops")
            await stop.asked.wait()
        if stop.killed_by is None:
            terminal.notice("stopping: running requests may finish; Ctrl-C again ends them")


def ready_line(cluster: LocalCluster, status: admin.ClusterStatus) -> str:
    """Return where a cluster is reached and what it consists of, in one line."""
    state = cluster.state
    registered = [worker.registration for worker in status.workers]
    workers = [(role, [each for each in registered if each.role == number]) for number, role in ROLES.items()]
    pools = " + ".join(_pool(role, pool) for role, pool in workers if pool)
    return f"ready: {state.model} at {state.http}/v1 (HTTP) and {state.endpoint} (gRPC) | {pools}"


def _pool(name: str, workers: list[link.Register]) -> str:
    num_pages, page_size = sum(worker.num_pages for worker in workers), workers[0].layout.page_size
    shown = f"{len(workers)} {name}, {num_pages} pages of {page_size} tokens"
    longest = min(worker.max_model_len for worker in workers)
    if any(_is_limited_by_pages(worker) for worker in workers):
        shown += f", which limit sequences to {longest} tokens"
    return shown


def _is_limited_by_pages(worker: link.Register) -> bool:
    """Whether a longer sequence would not fit in a worker's pages."""
    paging, longer = paging_from_proto(worker.layout), worker.max_model_len + 1
    return paging.most_pages(longer, worker.max_num_batched_tokens) > worker.num_pages


async def run_demo(spec: ClusterSpec, terminal: Terminal, question: str, expect: str) -> None:
    """Run a cluster for one question; CommandError unless the streamed answer contains `expect`."""
    texts: list[str] = []
    async with until_signal((spec,), terminal) as (clusters, stop):
        if await until_ready(clusters, terminal, stop):
            (cluster,) = clusters
            terminal.notice(ready_line(cluster, terminal.statuses[spec.name]))
            await first_of(_question(cluster.state.endpoint, question, texts), stop.asked.wait())
    if expect not in "".join(texts):
        raise CommandError(f"the answer does not contain {expect!r}")


async def _question(endpoint: str, question: str, texts: list[str]) -> None:
    params = inference.SamplingParams(temperature=0.0, max_tokens=DEMO_TOKENS)
    request = inference.GenerateRequest(sampling=params)
    add_message(request, "user", question)
    typer.echo(f"> {question}")
    answer = await ask(endpoint, request, lambda _index, text: typer.echo(text, nl=False))
    typer.echo()
    typer.echo(ledger_line(answer.usage, answer.ledger), err=True)
    texts += answer.texts
