"""What a worker knows of the device that computes its steps.

Invariant: steps are computed in the order in which they were started, and a step is over when it is on all ranks. A
worker that is served by several ranks knows them by their movers alone.
"""

import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from pdserve.engine.step import StepPlan, StepResult
from pdserve.kvtransfer.region import Region

StartStep = Callable[[StepPlan], Future[StepResult]]  # `Executor.start`


class Executor(Protocol):
    """Computes a worker's steps on one or more ranks, each of which has a part of the KV of every page."""

    @property
    def device_name(self) -> str:
        """By which routers learn what steps cost."""
        ...

    @property
    def region(self) -> Region:
        """Return the memory of pages: one that all ranks share, or that of the first rank. Page i is row i of each."""
        ...

    @property
    def mover_sockets(self) -> tuple[socket.socket, ...]:
        """Return what drives the movers of all further ranks that have memory of their own (`RemoteMover`)."""
        ...

    def start(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step behind those under way, of which there is at most one. Returns at once.

        The step may need tokens of the one before it. A request that cannot be computed is part of the result.
        DeviceError: nothing can be computed any more. InvariantError: the plan is wrong, or ranks disagree.
        """
        ...

    def take_memory(self) -> None:
        """Begin to take the memory of pages that comes when they are first written to. Does not wait for it."""
        ...

    def close(self) -> None:
        """Wait until what was started is over, and stop. Blocks."""
        ...
