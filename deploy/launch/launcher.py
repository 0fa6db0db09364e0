"""Talk to the launcher of a machine's cluster as its operator."""

from collections.abc import Sequence

from pdserve.certificates import Part
from pdserve.launch.calls import CALL_TIMEOUT_S, OperatorClient
from pdserve.proto.v1 import launcher_pb2 as launcher
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.launcher_pb2_grpc import LauncherServiceStub


class LauncherClient(OperatorClient):
    """One operator's connection to one launcher."""

    listener = Part.OPERATOR

    async def list_workers(self) -> Sequence[launcher.LaunchedWorker]:
        """Return the workers that run or start, those that drain included."""
        request = launcher.ListWorkersRequest()
        async with self.calling("LauncherService/ListWorkers") as (channel, proof):
            reply = await LauncherServiceStub(channel).ListWorkers(request, metadata=proof, timeout=CALL_TIMEOUT_S)
        return reply.workers

    async def start_worker(self, worker_id: str, role: "link.Role.ValueType") -> None:
        """Start a worker, unless there is one of this name."""
        request = launcher.StartWorkerRequest(worker_id=worker_id, role=role)
        async with self.calling("LauncherService/StartWorker") as (channel, proof):
            await LauncherServiceStub(channel).StartWorker(request, metadata=proof, timeout=CALL_TIMEOUT_S)

    async def stop_worker(self, worker_id: str) -> None:
        """Let a worker drain and end for good."""
        request = launcher.StopWorkerRequest(worker_id=worker_id)
        async with self.calling("LauncherService/StopWorker") as (channel, proof):
            await LauncherServiceStub(channel).StopWorker(request, metadata=proof, timeout=CALL_TIMEOUT_S)
