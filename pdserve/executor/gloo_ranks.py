"""The ranks of one machine as a gloo group: sums and gathered rows between processes."""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pdserve.model.weights import Rank

HOST = "127.0.0.1"
LEAST_LIMIT_S = 60.0  # to connect, whatever else the machine does


def common_store(descriptor: int, size: int) -> c10d.Store:
    """Return where so many ranks find each other. descriptor: of an open file that all of them have."""
    return c10d.FileStore(f"/proc/self/fd/{descriptor}", size)


class GlooRanks:
    """One rank of a group; see `pdserve.model.parallel.Collective`. RuntimeError where another rank has ended."""

    def __init__(self, rank: Rank, limit_s: float = LEAST_LIMIT_S) -> None:
        """limit_s: how long a rank waits for others in a sum; no less than it may take to connect."""
        self.rank = rank
        self.limit = timedelta(seconds=max(limit_s, LEAST_LIMIT_S))
        self._group: Any = None
        self._to_first: Any = c10d.GatherOptions()
        self._to_first.rootRank = 0

    def meet(self, store: c10d.Store) -> None:
        """Connect to the other ranks, which do so too by now. store: where they find each other's addresses."""
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self.limit  # of each sum, whatever `wait` is given
        options._devices = [gloo.create_device(hostname=HOST)]
        self._group = gloo(store, self.rank.index, self.rank.size, options)
        self.all_reduce(torch.zeros(1))  # connects

    def all_reduce(self, x: Tensor) -> None:
        self._await(self._group.allreduce([x]))

    def gather(self, x: Tensor) -> list[Tensor]:
        is_first = self.rank.index == 0
        parts = [torch.empty_like(x) for _ in range(self.rank.size)] if is_first else []
        self._await(self._group.gather([parts] if is_first else [], [x], self._to_first))
        return parts

    def _await(self, work: c10d.Work) -> None:
        work.wait()
