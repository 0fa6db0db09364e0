"""One rank, in the worker's own process."""

import socket
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from pdserve.engine.drafting import Drafter
from pdserve.engine.runner import EngineRunner, LaunchingRunner
from pdserve.engine.step import StepPlan, StepResult
from pdserve.engine.verification import verifying
from pdserve.executor.failing import Isolating
from pdserve.executor.launching import Launches, paced
from pdserve.executor.memory import take_in_background
from pdserve.kvtransfer.device_region import device_region
from pdserve.kvtransfer.region import Region


class LocalExecutor:
    """Computes steps in the thread that has loaded the model.

    OpenMP keeps a team of threads for every thread that ever computed. With a second team it would count more threads
    than cores, and none would spin any more: a decode step would take a third longer.
    """

    def __init__(
        self,
        runner: EngineRunner,
        thread: ThreadPoolExecutor,
        device_name: str = "",
        step_s: float = 0.0,
        drafter: Drafter | None = None,
        region: Region | None = None,
    ) -> None:
        """`thread`: one thread, which `close` ends. With `step_s` steps are paced, one by one.

        region: of a rank with memory of its own; else it is all of the runner's pages.
        """
        is_on_host = runner.kv.device.type == "cpu"
        self.device_name = device_name
        self.region = region or _region_of(runner.kv)
        self.mover_sockets: tuple[socket.socket, ...] = ()
        pools = [torch.as_tensor(self.region.view), *([] if drafter is None else drafter.own_memory)]
        self._pages_on_host = pools if is_on_host else []
        self._thread, self._ends = thread, ThreadPoolExecutor(1, "step-ends")  # starts with the first launched step
        run = verifying(runner.run)
        self._steps = Isolating(paced(run if drafter is None else drafter.beside(run), step_s))
        self._launches: Launches | None = None
        if isinstance(runner, LaunchingRunner) and not step_s:
            self._launches = Launches(runner, self._steps, drafter)

    def start(self, plan: StepPlan) -> Future[StepResult]:
        if self._launches is None:
            return self._thread.submit(self._steps.run, plan)
        return self._ends.submit(self._launches.finish, self._thread.submit(self._launches.launch, plan))

    def take_memory(self) -> None:
        for pages in self._pages_on_host:
            take_in_background(pages)

    def drain(self) -> None:
        """Wait until all launched steps are over. No step may be started after this."""
        self._ends.shutdown()

    def close(self) -> None:
        self._thread.shutdown()
        self._ends.shutdown()


def _region_of(kv: Tensor) -> Region:
    view = kv.view(torch.uint8).view(len(kv), -1)
    return Region.of(view.numpy()) if view.device.type == "cpu" else device_region(view)
