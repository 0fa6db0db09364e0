"""Talk to the launcher of a machine's cluster as its operator."""

from collections.abc import Sequence
from pathlib import Path

from pdserve.launch.calls import CALL_TIMEOUT_S, SecretClient
from pdserve.proto.v1 import launcher_pb2 as launcher
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.launcher_pb2_grpc import LauncherServiceStub


class LauncherClient(SecretClient):
    """One operator's connection to one launcher."""

    def __init__(self, address: str, secret_file: Path) -> None:
        super().__init__(address, secret_file)
        self._stub = LauncherServiceStub(self.channel)

    async def list_workers(self) -> Sequence[launcher.LaunchedWorker]:
        """Return the workers that run or start, those that drain included."""
        proof = await self.identify("LauncherService/ListWorkers", CALL_TIMEOUT_S)
        reply = await self._stub.ListWorkers(launcher.ListWorkersRequest(), metadata=proof, timeout=CALL_TIMEOUT_S)
        return reply.workers

    async def start_worker(self, worker_id: str, role: "link.Role.ValueType") -> None:
        """Start a worker, unless there is one of this name."""
        proof = await self.identify("LauncherService/StartWorker", CALL_TIMEOUT_S)
        request = launcher.StartWorkerRequest(worker_id=worker_id, role=role)
        await self._stub.StartWorker(request, metadata=proof, timeout=CALL_TIMEOUT_S)

    async def stop_worker(self, worker_id: str) -> None:
        """Let a worker drain and end for good."""
        proof = await self.identify("LauncherService/StopWorker", CALL_TIMEOUT_S)
        request = launcher.StopWorkerRequest(worker_id=worker_id)
        await self._stub.StopWorker(request, metadata=proof, timeout=CALL_TIMEOUT_S)
