"""One cluster on this machine: a router and its workers as supervised processes, and an autoscaler where one is wanted.

A worker's end is reported to the router at once. The report is the proof that nothing of that process can write
into another worker's pages any more, which frees the pages that wait for it.
"""

import asyncio
import json
import os
from asyncio.subprocess import DEVNULL, STDOUT
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import CommandError, ConfigError, first_of
from pdserve.base.files import write_atomically
from pdserve.checkpoint.home import default_cache_dir
from pdserve.checkpoint.open import check_model
from pdserve.launch.authority import write_certificates
from pdserve.launch.devices import deal
from pdserve.launch.folder import (
    CERTIFICATES,
    ClusterState,
    ProcessState,
    claimed_folder,
    claimed_port,
    drained_file,
    free_port,
    write_secret,
)
from pdserve.launch.plan import PDSERVE, PUBLISHED, WORKER_ROLES, ClusterSpec, ServedAt, Wiring, threads_each
from pdserve.launch.service import ROUTERS_END_S, WORKERS_END_S, LauncherEndpoint, serving
from pdserve.launch.supervisor import Backoff, ChildExit, Stage, Supervisor, report_end
from pdserve.net.certificates import Part
from pdserve.net.operator_client import AdminClient
from pdserve.net.rpc import join_address
from pdserve.proto.v1 import admin_pb2 as admin

PUBLIC_PORT = 50051
HTTP_PORT = 8000
CERTIFICATE_DAYS = 365
RECONNECT_S = 0.2
MAX_RESTARTS_BEFORE_READY = 3
MAX_GONE = 64  # ended processes that are reported to a router that starts again
END_ELSEWHERE_S = 60.0  # after drain_timeout_s, for workers on other machines: Ray is reached first


class LaunchError(CommandError):
    """The cluster could not be brought up; names the process that failed and its log."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks for what happens in a cluster."""

    on_status: Callable[[admin.ClusterStatus], None]
    on_notice: Callable[[str], None]
    status_interval_s: float = 1.0  # between two statuses, unless workers come or go: each costs the router 0.4 ms


class LocalCluster:
    """A running cluster; made by `running`."""

    def __init__(self, state: ClusterState, supervisor: Supervisor, listener: Listener) -> None:
        self._state = state
        self._state_file = state.secret_file.parent / "state.json"
        self._supervisor = supervisor
        self._listener = listener
        self.ready = asyncio.Event()
        self._gone: deque[ChildExit] = deque(maxlen=MAX_GONE)
        self._published: dict[tuple[str, int], dict[str, str]] = {}  # by process and incarnation: its own endpoints
        self._serving: set[tuple[str, int]] = set()  # workers and incarnations that the router reports as ready
        self._has_drained = True  # whether all processes that have ended since the stop began had drained
        self.launcher = ""  # host:port at which workers are started and stopped

    @property
    def state(self) -> ClusterState:
        """What other commands can read of the cluster."""
        processes = tuple(
            process.model_copy(update=self._published.get((process.name, process.incarnation), {}))
            for process in self._supervisor.processes
        )
        found = {"processes": processes, "ready": self.ready.is_set(), "launcher": self.launcher}
        return self._state.model_copy(update=found)

    def serves(self, worker: ProcessState) -> bool:
        """Whether this process of a worker is ready, as the router last reported it."""
        return (worker.name, worker.incarnation) in self._serving

    async def stop(self, drain_timeout_s: float) -> None:
        """Let running requests finish, then end every process: first those that know the requests."""
        within_s = drain_timeout_s + ROUTERS_END_S
        first = (Stage(("autoscaler", "frontend"), within_s), Stage(("router",), within_s))
        await self._supervisor.stop((*first, Stage(WORKER_ROLES, drain_timeout_s + WORKERS_END_S)))

    async def stop_frontends(self, drain_timeout_s: float) -> None:
        """Let what the frontends serve finish, then end them; their routers may be other clusters'."""
        await self._supervisor.stop((Stage(("frontend",), drain_timeout_s + ROUTERS_END_S),))

    async def end_elsewhere(self) -> None:
        """Let the workers on other machines drain and end, while the router is there to take note of it."""
        if self._state.elsewhere is None or self._supervisor.is_stopping:
            return
        spec = self._state.elsewhere.spec
        self._supervisor.retire("autoscaler", 0.0)  # it would start other workers
        command = (*PDSERVE, "autoscale", "end", str(spec.autoscaling), "--name", spec.name)
        with self._supervisor.log_file("end").open("ab") as log:
            process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=log, stderr=STDOUT)
        try:
            async with asyncio.timeout(spec.drain_timeout_s + END_ELSEWHERE_S):
                status = await process.wait()
        except TimeoutError:
            process.kill()
            status = await process.wait()
        if status != 0:
            self._has_drained = False
            self._listener.on_notice(f"workers may be left on other machines (log: {self._supervisor.log_file('end')})")

    def kill(self) -> None:
        """End every process now. Workers on other machines stay."""
        self._supervisor.kill()

    async def supervise(self) -> None:
        """Keep the processes running and report each worker's end to the router; note at last whether all drained."""
        client = self._state.operator()
        helpers: set[asyncio.Task[None]] = set()

        def on_exit(exit_: ChildExit) -> None:
            if exit_.spec.is_worker and not self._supervisor.is_stopping:
                self._gone.append(exit_)
                report = tasks.create_task(report_end(client, exit_))
                helpers.add(report)
                report.add_done_callback(helpers.discard)
            if self._supervisor.is_stopping and exit_.status != 0:
                self._has_drained = False
            self._publish()
            self._announce(exit_)

        self._write_state()  # an autoscaler reads it when it starts
        async with asyncio.TaskGroup() as tasks:
            helpers.add(tasks.create_task(self._watch(client)))
            await self._supervisor.run(on_exit, self._publish)
            for helper in helpers:
                helper.cancel()
        if self._has_drained:
            with suppress(OSError):  # its folder is gone, or the disk is full
                drained_file(self._state.name).touch()

    def _publish(self) -> None:
        """Write the state anew. If that fails, the cluster serves on, and other commands read an old state."""
        try:
            self._write_state()
        except OSError as error:
            self._listener.on_notice(f"{self._state_file} is not up to date: {error.strerror}")

    def _write_state(self) -> None:
        state = self.state
        write_atomically(self._state_file, state.model_dump_json(indent=2) + "\n")
        write_atomically(self._state_file.with_name("metrics.json"), json.dumps(_targets(state), indent=2) + "\n")

    def _announce(self, exit_: ChildExit) -> None:
        name, log = exit_.spec.name, self._supervisor.log_file(exit_.spec.name)
        if exit_.restart_in_s is None:
            if not self._supervisor.is_stopping and exit_.spec.role != "autoscaler":  # which is retired on purpose
                self._listener.on_notice(f"{name} has ended with status {exit_.status} (log: {log})")
            return
        num_restarts = next(p.num_restarts for p in self._supervisor.processes if p.name == name)
        if not self.ready.is_set() and num_restarts >= MAX_RESTARTS_BEFORE_READY:
            line = self._supervisor.last_words(name)
            raise LaunchError(f"{name} does not start (status {exit_.status}): {line} (log: {log})")
        self._listener.on_notice(
            f"{name} ended with status {exit_.status}; starting again in {exit_.restart_in_s:g} s (log: {log})"
        )

    async def _watch(self, client: AdminClient) -> None:
        while True:
            has_reported = False  # a router that starts again does not know which processes have ended
            try:
                async for status in client.watch(self._listener.status_interval_s, wait_for_ready=True):
                    if not has_reported:
                        has_reported = True
                        for gone in tuple(self._gone):
                            await report_end(client, gone)
                    self._listener.on_status(status)
                    before, self._published = self._published, self._endpoints(status)
                    ready = (each.registration for each in status.workers if each.registration.ready)
                    self._serving = {(worker.worker_id, worker.incarnation) for worker in ready}
                    if not self.ready.is_set() and self._is_complete(len(status.frontends)):
                        self.ready.set()
                        self._publish()
                    elif self._published != before:
                        self._publish()
            except grpc.aio.AioRpcError as error:
                # Once the cluster is ready, no error of a router ends it: one that is killed may also leave INTERNAL.
                if not self.ready.is_set() and error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise LaunchError(f"the router does not report its state: {error.details()}") from error
            await asyncio.sleep(RECONNECT_S)  # the router is gone; its successor needs longer than this to listen

    def _is_complete(self, num_frontends: int) -> bool:
        if num_frontends < sum(each.role == "frontend" for each in self._supervisor.processes):
            return False
        if self._state.elsewhere is not None:
            return len(self._serving) >= self._state.elsewhere.spec.num_workers
        return all(map(self.serves, (each for each in self._supervisor.processes if each.role in WORKER_ROLES)))

    def _endpoints(self, status: admin.ClusterStatus) -> dict[tuple[str, int], dict[str, str]]:
        """Return where processes publish KV events and metrics: they report the free ports that they took."""
        keys, workers = (*PUBLISHED, "metrics_address"), [worker.registration for worker in status.workers]
        found = {(w.worker_id, w.incarnation): {key: getattr(w, key) for key in keys} for w in workers}
        others = {each.frontend_id: each.metrics_address for each in status.frontends}
        others |= {each.name: status.metrics_address for each in self._supervisor.processes if each.role == "router"}
        shown = [each for each in self._supervisor.processes if each.name in others]
        return found | {(each.name, each.incarnation): {keys[-1]: others[each.name]} for each in shown}


def _targets(state: ClusterState) -> list[dict[str, object]]:
    """Return where the processes of a cluster show their metrics, as Prometheus reads it from a file."""
    shown = [process for process in state.processes if process.metrics_address]
    return [{"targets": [each.metrics_address], "labels": {"process": each.name}} for each in shown]


@asynccontextmanager
async def running(
    spec: ClusterSpec, listener: Listener, *, backoff: Backoff | None = None
) -> AsyncIterator[LocalCluster]:
    """Run a cluster for the length of the block; at its end let it drain, and leave nothing running.

    Raises ConfigError for a model with wrong files, before any process starts, and when a process refuses its
    configuration; LaunchError when one keeps failing before all
    are ready; both end the block.
    """
    with claimed_folder(spec.name) as folder, _claimed_ports(spec) as (port, http_port):
        devices, spec = await asyncio.to_thread(deal, spec)
        num_cores = len(os.sched_getaffinity(0))
        wiring = Wiring(
            spec,
            public_port=port,
            http_port=http_port,
            internal_host=spec.internal_host,
            internal_port=spec.internal_port or free_port(spec.internal_host, "--internal-host"),
            secret_file=write_secret(folder, spec.workers_secret_file),
            num_threads=None
            if "OMP_NUM_THREADS" in os.environ
            else threads_each(spec.most_workers + spec.num_beside, num_cores),
            certificates=_certificates(spec, folder),
            shared_weights_dir=default_cache_dir() / "weights",
        )
        await asyncio.to_thread(check_model, Path(spec.model), with_weights=spec.reads_weights)
        supervisor = Supervisor(wiring.children(), folder / "logs", MonotonicClock(), backoff=backoff, devices=devices)
        cluster = LocalCluster(_state(wiring), supervisor, listener)
        endpoint = LauncherEndpoint(supervisor, wiring, cluster.serves)
        try:
            identity_dir = wiring.identity_dir(Part.OPERATOR)
            async with (
                serving(endpoint, wiring.secret_file, identity_dir) as cluster.launcher,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(cluster.supervise())
                yield cluster
                if spec.elsewhere:
                    await cluster.end_elsewhere()
                await cluster.stop(spec.drain_timeout_s)
        except ExceptionGroup as group:
            expected, rest = group.split((ConfigError, CommandError))
            if expected is None or rest is not None:
                raise
            raise first_of(expected, Exception) or expected from None


@contextmanager
def _claimed_ports(spec: ClusterSpec) -> Iterator[tuple[int, int]]:
    """Have the ports for clients, gRPC's and HTTP's, for the length of the block; none where others serve them."""
    if spec.served_at is not None:
        yield 0, 0
        return
    with (
        claimed_port(spec.host, spec.router_port, PUBLIC_PORT) as port,
        claimed_port(spec.host, spec.http_port, HTTP_PORT, "--http-port") as http_port,
    ):
        yield port, http_port


def _certificates(spec: ClusterSpec, folder: Path) -> Path | None:
    if spec.served_at is not None:
        return spec.served_at.certificates
    if not spec.tls:
        return None
    write_certificates(folder / CERTIFICATES, (spec.host,), CERTIFICATE_DAYS)
    return folder / CERTIFICATES


def _state(wiring: Wiring) -> ClusterState:
    spec = wiring.spec
    at = spec.served_at or ServedAt(join_address(spec.host, wiring.public_port), _url(wiring))
    return ClusterState(
        name=spec.name,
        supervisor_pid=os.getpid(),
        endpoint=at.endpoint,
        http=at.http,
        others=spec.others,
        lead=at.lead,
        admin=wiring.router,
        secret_file=wiring.secret_file,
        identity_dir=wiring.identity_dir(Part.OPERATOR),
        ca_file=None if wiring.certificates is None else wiring.certificates / "ca.crt",
        model=spec.served_model_name,
        ready=False,
        processes=(),
        elsewhere=_seen_elsewhere(wiring) if spec.elsewhere else None,
    )


def _url(wiring: Wiring) -> str:
    spec = wiring.spec
    if wiring.http_port is None:
        return ""
    scheme = "https" if spec.tls or "ssl_certfile" in spec.router_flags else "http"
    return f"{scheme}://{join_address(spec.host, wiring.http_port)}"


def _seen_elsewhere(wiring: Wiring) -> Wiring:
    """Return what workers on other machines are started by."""
    secret_file = wiring.spec.workers_secret_file or wiring.secret_file
    return replace(wiring, secret_file=secret_file, num_threads=None, shared_weights_dir=None)
