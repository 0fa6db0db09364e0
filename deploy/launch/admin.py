"""Talk to a router's internal port as its operator."""

from collections.abc import AsyncIterator
from pathlib import Path

from pdserve import rpc
from pdserve.ids import Incarnation, WorkerId
from pdserve.launch.calls import CALL_TIMEOUT_S, SecretClient
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceStub


class AdminClient(SecretClient):
    """One operator's connection to one router."""

    def __init__(self, address: str, secret_file: Path) -> None:
        super().__init__(address, secret_file)
        self._stub = AdminServiceStub(self.channel)

    async def status(self) -> admin.ClusterStatus:
        """Return the cluster as the router sees it now."""
        proof = await self._identify("GetStatus", CALL_TIMEOUT_S)
        reply = await self._stub.GetStatus(admin.GetStatusRequest(), metadata=proof, timeout=CALL_TIMEOUT_S)
        return reply.status

    async def watch(self, *, wait_for_ready: bool = False) -> AsyncIterator[admin.ClusterStatus]:
        """Yield the cluster now and after each change, until the router ends the stream."""
        request = admin.WatchStatusRequest()
        proof = await self._identify("WatchStatus", wait_for_ready=wait_for_ready)
        async for reply in self._stub.WatchStatus(request, metadata=proof):
            yield reply.status

    async def drain(self, worker_id: WorkerId) -> None:
        """Ask a worker to finish what it runs, and to exit."""
        proof = await self._identify("DrainWorker", CALL_TIMEOUT_S)
        request = admin.DrainWorkerRequest(worker_id=worker_id)
        await self._stub.DrainWorker(request, metadata=proof, timeout=CALL_TIMEOUT_S)

    async def set_role(self, worker_id: WorkerId, role: "link.Role.ValueType", *, force: bool = False) -> int:
        """Give a worker a role; return its epoch once the worker has taken it.

        Unless with `force`, never to the last worker that computes prompts, or that decodes, if it would not go on.
        """
        proof = await self._identify("SetWorkerRole", CALL_TIMEOUT_S)
        request = admin.SetWorkerRoleRequest(worker_id=worker_id, role=role, force=force)
        return (await self._stub.SetWorkerRole(request, metadata=proof, timeout=CALL_TIMEOUT_S)).epoch

    async def move(self, worker_id: WorkerId, target: WorkerId | None = None, count: int = 0) -> int:
        """Move running continuations off a worker, so many at most (0: all); return how many are to move.

        With no target, each goes to where the router finds room.
        """
        proof = await self._identify("MoveSequences", CALL_TIMEOUT_S)
        request = admin.MoveSequencesRequest(worker_id=worker_id, target_worker_id=target or "", max_sequences=count)
        return (await self._stub.MoveSequences(request, metadata=proof, timeout=CALL_TIMEOUT_S)).num_sequences

    async def report_gone(
        self, worker_id: WorkerId, incarnation: Incarnation, timeout_s: float, *, from_outside: bool
    ) -> None:
        """Report to the router that a worker's process is gone; waits for a router up to `timeout_s`.

        `from_outside`: a signal or a drain ended it, not what it computed.
        """
        proof = await self._identify("ReportProcessGone", timeout_s, wait_for_ready=True)
        process = link.ProcessGone(worker_id=worker_id, incarnation=incarnation)
        await self._stub.ReportProcessGone(
            admin.ReportProcessGoneRequest(process=process, from_outside=from_outside),
            metadata=proof,
            timeout=timeout_s,
        )

    async def _identify(
        self, method: str, timeout_s: float | None = None, *, wait_for_ready: bool = False
    ) -> rpc.Metadata:
        return await self.identify(f"AdminService/{method}", timeout_s, wait_for_ready=wait_for_ready)
