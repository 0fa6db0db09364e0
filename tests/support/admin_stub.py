"""The part of a router that operators talk to: it lists workers, gives roles, and takes reports of ended processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from pdserve.base.roles import Role
from pdserve.net import rpc
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from pdserve.protocol.link import ROLES


class Router(AdminServiceServicer):
    """What is attached to it, and what it was asked for."""

    def __init__(self) -> None:
        self.ready: dict[str, int] = {}  # incarnations by worker
        self.launched: dict[str, str] = {}  # launch_id by worker
        self.roles: dict[str, Role] = {}
        self.gone: list[tuple[str, int]] = []
        self.from_outside: dict[int, bool] = {}  # by incarnation that is gone
        self.hangs_at = 0  # the incarnation whose report is not answered
        self.num_hung = 0
        self.decisions: list[str] = []

    async def GetStatus(self, request: object, context: object) -> admin.GetStatusResponse:  # noqa: N802
        workers = []
        for name, number in self.ready.items():
            role = link.Role.Value(f"ROLE_{self.roles[name].name}") if name in self.roles else link.ROLE_UNSPECIFIED
            launched = self.launched.get(name, "")
            each = link.Register(worker_id=name, incarnation=number, ready=True, role=role, launch_id=launched)
            workers.append(admin.WorkerStatus(registration=each))
        return admin.GetStatusResponse(status=admin.ClusterStatus(workers=workers))

    async def ReportDecisions(  # noqa: N802
        self, request: admin.ReportDecisionsRequest, context: object
    ) -> admin.ReportDecisionsResponse:
        self.decisions.extend(request.decisions)
        return admin.ReportDecisionsResponse()

    async def SetWorkerRole(  # noqa: N802
        self, request: admin.SetWorkerRoleRequest, context: "grpc.aio.ServicerContext"
    ) -> admin.SetWorkerRoleResponse:
        if request.worker_id not in self.ready:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not attached")
        self.roles[request.worker_id] = ROLES[request.role]
        return admin.SetWorkerRoleResponse(epoch=1)

    async def ReportProcessGone(  # noqa: N802
        self, request: admin.ReportProcessGoneRequest, context: object
    ) -> admin.ReportProcessGoneResponse:
        if request.process.incarnation == self.hangs_at:
            self.num_hung += 1
            await asyncio.Event().wait()
        self.gone.append((request.process.worker_id, request.process.incarnation))
        self.from_outside[request.process.incarnation] = request.from_outside
        return admin.ReportProcessGoneResponse()


@asynccontextmanager
async def serving(router: Router, secret_file: Path, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve for the length of the block; yields host:port."""
    server = grpc.aio.server(interceptors=[rpc.RequireSecret(rpc.read_secret(secret_file))])
    add_AdminServiceServicer_to_server(router, server)
    address = rpc.listen(server, host, port, "router")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)
