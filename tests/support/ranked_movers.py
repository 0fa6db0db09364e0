"""The mover of several ranks: further ranks are threads of this process, and driven over sockets as processes are."""

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from pdserve.base.clock import Clock
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.kvtransfer.backends.backend import Backend
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.mover_process import serve
from pdserve.kvtransfer.ranked_mover import RankedMover
from pdserve.kvtransfer.remote_mover import RemoteMover

ME = Peer(WorkerId("me"), Incarnation(1))


@contextmanager
def ranked_mover(
    backends: Sequence[Backend], on_stopped: OnStopped, clock: Clock | None = None
) -> Iterator[RankedMover]:
    """Move pages of all ranks for the length of the block. backends: of each rank, in their order."""
    first, *further = backends
    with ExitStack() as ranks:
        others = [
            ranks.enter_context(remote_mover(backend, part, on_stopped, clock))
            for part, backend in enumerate(further, start=1)
        ]
        with closing(RankedMover(Mover(first, on_stopped, clock), others)) as mover:
            yield mover


@contextmanager
def remote_mover(
    backend: Backend, part: int, on_stopped: OnStopped, clock: Clock | None = None
) -> Iterator[RemoteMover]:
    """Have a further rank for the length of the block, in which its mover is to be closed."""
    ours, theirs = socket.socketpair()

    def drive() -> None:
        asyncio.run(serve(theirs, lambda _, report: Mover(backend, report, clock), lambda: None))

    thread = threading.Thread(target=drive, name=f"rank-{part}")
    thread.start()
    with ours:
        yield RemoteMover(ours, ME, part, on_stopped)
        thread.join()
