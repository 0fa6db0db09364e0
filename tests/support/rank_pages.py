"""The pages of a worker's ranks, as they lie in the memory of each process."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from pdserve.base.clock import new_incarnation
from pdserve.base.ids import Peer, WorkerId
from pdserve.executor.executor import Executor
from pdserve.kvtransfer.region import Description, decode_ranks
from pdserve.kvtransfer.remote_mover import RemoteMover
from pdserve.kvtransfer.routes import Share, whole_of


def ranks() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "pdserve.executor.rank" in child.cmdline()]


@dataclass(frozen=True)
class Pages:
    """A rank's pages, in the memory of its process."""

    pid: int
    share: Share
    there: Description
    is_own: bool = True  # then each head has all of its layers in one run

    def read(self, page: int) -> npt.NDArray[np.float32]:
        with Path(f"/proc/{self.pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(self.there.address + page * self.there.page_bytes)
            found = np.frombuffer(memory.read(self.there.page_bytes), np.float32)
        share = self.share
        if not self.is_own:
            return found.reshape(share.num_layers, 2, share.num_heads, -1)
        return found.reshape(share.num_heads, share.num_layers, 2, -1).transpose(1, 2, 0, 3)


def pages_of(executor: Executor, whole: Share) -> list[Pages]:
    """Return where the pages of all ranks lie that have memory of their own, or of the first one."""
    share = executor.region.share or whole
    found = [Pages(os.getpid(), share, executor.region.description(), executor.region.share is not None)]
    for part, (process, connected) in enumerate(zip(ranks(), executor.mover_sockets, strict=False), start=1):
        mover = RemoteMover(connected, Peer(WorkerId("w"), new_incarnation()), part, print)
        found += [Pages(process.pid, *each) for each in decode_ranks(mover.description)]
    return found


def whole_page(parts: list[Pages], page: int) -> npt.NDArray[np.float32]:
    """Return K and V of a page, from the memory of all ranks."""
    rows, shares = [part.read(page) for part in parts], whole_of([part.share for part in parts])
    whole = np.full((shares.num_layers, 2, shares.num_heads, rows[0].shape[-1]), np.nan, np.float32)
    for part, content in zip(parts, rows, strict=True):
        whole[slice(*part.share.layers), :, slice(*part.share.heads)] = content
    return whole
