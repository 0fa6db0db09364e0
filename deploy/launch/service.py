"""LauncherService: the workers of a local cluster, which come and go while it serves."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from pdserve.base.errors import echo
from pdserve.base.roles import Role
from pdserve.base.signals import CLOSING_S
from pdserve.launch.folder import ProcessState
from pdserve.launch.plan import WORKER_NAME, WORKER_ROLES, Wiring
from pdserve.launch.supervisor import Supervisor
from pdserve.net.certificates import Part
from pdserve.net.credentials import Credentials
from pdserve.net.rpc import AnyContext, abort, running
from pdserve.proto.v1 import launcher_pb2 as launcher
from pdserve.proto.v1.launcher_pb2_grpc import LauncherServiceServicer, add_LauncherServiceServicer_to_server
from pdserve.protocol.link import ROLE_NUMBERS, ROLES

# A process is killed so many seconds after its drain_timeout_s; it should have ended before. Workers end last.
ROUTERS_END_S = CLOSING_S + 1.0
WORKERS_END_S = ROUTERS_END_S + 1.0
OTHERS = ("router", "autoscaler")  # names of other processes


class LauncherEndpoint(LauncherServiceServicer):
    """Starts and stops workers among the children of a supervisor."""

    def __init__(self, supervisor: Supervisor, wiring: Wiring, is_ready: Callable[[ProcessState], bool]) -> None:
        """`is_ready`: whether a worker's process serves, as far as routers have reported it."""
        self._supervisor = supervisor
        self._wiring = wiring
        self._max_workers = wiring.spec.most_workers
        self._end_within_s = wiring.spec.drain_timeout_s + WORKERS_END_S
        self._is_ready = is_ready

    async def ListWorkers(  # noqa: N802
        self, request: launcher.ListWorkersRequest, context: object
    ) -> launcher.ListWorkersResponse:
        del request, context
        workers = [self._shown(process) for process in self._workers().values()]
        return launcher.ListWorkersResponse(workers=workers, max_workers=self._max_workers)

    async def StartWorker(  # noqa: N802
        self, request: launcher.StartWorkerRequest, context: AnyContext
    ) -> launcher.StartWorkerResponse:
        name, role = request.worker_id, ROLES.get(request.role)
        if not WORKER_NAME.fullmatch(name) or name in OTHERS:
            text = f"worker_id: {echo(name, repr)} cannot name a worker"
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, text)
        if role is None:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"role: {request.role} is unknown")
        if self._supervisor.is_stopping:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "the cluster is stopping")
        workers = self._workers()
        if name not in workers:
            if len(workers) >= self._max_workers:
                leaving = sum(process.leaving for process in workers.values())
                text = f"--max-workers: {len(workers)} are there, of which {leaving} drain; {self._max_workers} may be"
                await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            self._supervisor.add(self._wiring.worker(name, role))
        elif workers[name].leaving:
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, f"worker_id: {name} is still draining")
        return launcher.StartWorkerResponse()

    async def StopWorker(  # noqa: N802
        self, request: launcher.StopWorkerRequest, context: AnyContext
    ) -> launcher.StopWorkerResponse:
        name = request.worker_id
        if name not in self._workers():
            await abort(context, grpc.StatusCode.NOT_FOUND, f"worker_id: {echo(name, repr)} is not here")
        self._supervisor.retire(name, self._end_within_s)
        return launcher.StopWorkerResponse()

    def _workers(self) -> dict[str, ProcessState]:
        return {process.name: process for process in self._supervisor.processes if process.role in WORKER_ROLES}

    def _shown(self, process: ProcessState) -> launcher.LaunchedWorker:
        state = launcher.WORKER_STATE_READY if self._is_ready(process) else launcher.WORKER_STATE_STARTING
        return launcher.LaunchedWorker(
            worker_id=process.name,
            role=ROLE_NUMBERS[Role(process.role)],
            state=launcher.WORKER_STATE_DRAINING if process.leaving else state,
            incarnation=process.incarnation,
        )


@asynccontextmanager
async def serving(
    endpoint: LauncherEndpoint, secret_file: Path, identity_dir: Path | None = None
) -> AsyncIterator[str]:
    """Serve on loopback for the length of the block; yield the address, host:port."""
    credentials = Credentials.read(secret_file, identity_dir, Part.OPERATOR)
    server = credentials.server(lambda _: None)
    add_LauncherServiceServicer_to_server(endpoint, server)
    address = credentials.listen(server, "127.0.0.1", 0, "launcher")
    async with running(server):
        yield address
