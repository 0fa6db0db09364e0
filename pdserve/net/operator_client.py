"""Talk to the internal ports of a router and of a launcher, as an operator of the cluster."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from pathlib import Path
from typing import ClassVar, Self

import grpc

from pdserve.base.ids import Incarnation, WorkerId
from pdserve.base.roles import Role
from pdserve.net import rpc
from pdserve.net.certificates import Part
from pdserve.net.credentials import Credentials
from pdserve.net.rpc import Metadata
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import launcher_pb2 as launcher
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceStub
from pdserve.proto.v1.launcher_pb2_grpc import LauncherServiceStub
from pdserve.protocol.link import ROLE_NUMBERS

CALL_TIMEOUT_S = 10.0


class OperatorClient:
    """Calls of one internal port, which raise grpc.aio.AioRpcError.

    Each call dials anew, with the certificate that is in place by then. Streams on earlier connections go on.
    """

    listener: ClassVar[Part]  # whose port it is

    def __init__(self, address: str, secret_file: Path, identity_dir: Path | None = None) -> None:
        """ConfigError names the setting of the credentials that is refused."""
        self.address = address
        self.credentials = Credentials.read(secret_file, identity_dir, Part.OPERATOR)

    def at(self, address: str) -> Self:
        """Return a connection to another port of the same kind, with the same credentials."""
        other = copy(self)
        other.address = address
        return other

    @asynccontextmanager
    async def calling(
        self, method: str, timeout_s: float | None = CALL_TIMEOUT_S, *, wait_for_ready: bool = False
    ) -> AsyncIterator[tuple[grpc.aio.Channel, rpc.Metadata]]:
        """Yield a connection, and the metadata of one call of a method, service/name, that is to be made there."""
        method, secret = f"/pdserve.v1.{method}", self.credentials.secret
        async with self.credentials.channel(self.address, self.listener) as channel:
            yield channel, await rpc.identify(channel, secret, method, timeout_s, wait_for_ready=wait_for_ready)


class AdminClient(OperatorClient):
    """One operator's connection to one router."""

    listener = Part.ROUTER

    async def status(self, *, within_s: float | None = None) -> admin.ClusterStatus:
        """Return the cluster as the router sees it; with `within_s`, as soon as there is a router."""
        return (await self.status_and_clock(within_s=within_s)).status

    async def status_and_clock(self, *, within_s: float | None = None) -> admin.GetStatusResponse:
        """Return the same, and the router's time."""
        waits, timeout_s = within_s is not None, within_s or CALL_TIMEOUT_S
        async with self._stub("GetStatus", timeout_s, wait_for_ready=waits) as (stub, proof):
            return await stub.GetStatus(admin.GetStatusRequest(), metadata=proof, timeout=CALL_TIMEOUT_S)

    async def watch(
        self, interval_s: float = 0.0, *, wait_for_ready: bool = False
    ) -> AsyncIterator[admin.ClusterStatus]:
        """Yield the cluster now and after each change, until the router ends the stream.

        Of changes other than to which workers serve, none is yielded sooner than `interval_s` after the last.
        """
        request = admin.WatchStatusRequest(min_interval_ms=round(interval_s * 1e3))
        async with self._stub("WatchStatus", None, wait_for_ready=wait_for_ready) as (stub, proof):
            async for reply in stub.WatchStatus(request, metadata=proof):
                yield reply.status

    async def drain(self, worker_id: WorkerId, *, cancel: bool = False) -> None:
        """Ask a worker to finish what it runs, and to exit; or to take work again, where it has not exited yet."""
        request = admin.DrainWorkerRequest(worker_id=worker_id, cancel=cancel)
        async with self._stub("DrainWorker") as (stub, proof):
            await stub.DrainWorker(request, metadata=proof, timeout=CALL_TIMEOUT_S)

    async def set_role(self, worker_id: WorkerId, role: Role, *, force: bool = False) -> int:
        """Give a worker a role; return its epoch once the worker has taken it.

        Unless with `force`, never to the last worker that computes prompts, or that decodes, if it would not go on.
        """
        request = admin.SetWorkerRoleRequest(worker_id=worker_id, role=ROLE_NUMBERS[role], force=force)
        async with self._stub("SetWorkerRole") as (stub, proof):
            return (await stub.SetWorkerRole(request, metadata=proof, timeout=CALL_TIMEOUT_S)).epoch

    async def move(self, worker_id: WorkerId, target: WorkerId | None = None, count: int = 0) -> int:
        """Move running continuations off a worker, so many at most (0: all); return how many are to move.

        With no target, each goes to where the router finds room.
        """
        request = admin.MoveSequencesRequest(worker_id=worker_id, target_worker_id=target or "", max_sequences=count)
        async with self._stub("MoveSequences") as (stub, proof):
            return (await stub.MoveSequences(request, metadata=proof, timeout=CALL_TIMEOUT_S)).num_sequences

    async def report_decisions(self, decisions: Sequence[str]) -> None:
        """Tell the router what an autoscaler decided and why, for whoever watches the cluster."""
        request = admin.ReportDecisionsRequest(decisions=decisions)
        async with self._stub("ReportDecisions") as (stub, proof):
            await stub.ReportDecisions(request, metadata=proof, timeout=CALL_TIMEOUT_S)

    async def report_gone(
        self, worker_id: WorkerId, incarnation: Incarnation, timeout_s: float, *, from_outside: bool
    ) -> None:
        """Report to the router that a worker's process is gone; waits for a router up to `timeout_s`.

        `from_outside`: a signal or a drain ended it, not what it computed.
        """
        process = link.ProcessGone(worker_id=worker_id, incarnation=incarnation)
        request = admin.ReportProcessGoneRequest(process=process, from_outside=from_outside)
        async with self._stub("ReportProcessGone", timeout_s, wait_for_ready=True) as (stub, proof):
            await stub.ReportProcessGone(request, metadata=proof, timeout=timeout_s)

    @asynccontextmanager
    async def _stub(
        self, method: str, timeout_s: float | None = CALL_TIMEOUT_S, *, wait_for_ready: bool = False
    ) -> AsyncIterator[tuple[AdminServiceStub, Metadata]]:
        name = f"AdminService/{method}"
        async with self.calling(name, timeout_s, wait_for_ready=wait_for_ready) as (channel, proof):
            yield AdminServiceStub(channel), proof


class LauncherClient(OperatorClient):
    """One operator's connection to one launcher."""

    listener = Part.OPERATOR

    async def list_workers(self) -> Sequence[launcher.LaunchedWorker]:
        """Return the workers that run or start, those that drain included."""
        request = launcher.ListWorkersRequest()
        async with self.calling("LauncherService/ListWorkers") as (channel, proof):
            reply = await LauncherServiceStub(channel).ListWorkers(request, metadata=proof, timeout=CALL_TIMEOUT_S)
        return reply.workers

    async def start_worker(self, worker_id: str, role: Role) -> None:
        """Start a worker, unless there is one of this name."""
        request = launcher.StartWorkerRequest(worker_id=worker_id, role=ROLE_NUMBERS[role])
        async with self.calling("LauncherService/StartWorker") as (channel, proof):
            await LauncherServiceStub(channel).StartWorker(request, metadata=proof, timeout=CALL_TIMEOUT_S)

    async def stop_worker(self, worker_id: str) -> None:
        """Let a worker drain and end for good."""
        request = launcher.StopWorkerRequest(worker_id=worker_id)
        async with self.calling("LauncherService/StopWorker") as (channel, proof):
            await LauncherServiceStub(channel).StopWorker(request, metadata=proof, timeout=CALL_TIMEOUT_S)
