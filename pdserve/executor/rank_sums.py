"""How ranks add, gather and pass on what they make: in memory that they share; without a compiled library over sockets.

Pipeline stages need the library.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.base.errors import ConfigError, DeviceError
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.calls import Calls, Immediate
from pdserve.kernels.cpu.library import DTYPES, library
from pdserve.kernels.cpu.ranks import SLOT_BYTES, RankMemory, gather_columns, sum_over_ranks
from pdserve.model.elementwise import times
from pdserve.model.stages import Stages
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel
from pdserve.settings.degrees import Degrees

CPU = torch.device("cpu")


class SharedRanks:
    """One rank; see `pdserve.model.parallel.Collective`. It waits for others in a sum for a limited time."""

    device = CPU

    def __init__(self, rank: Rank, memory: RankMemory, calls: Calls, limit_s: float) -> None:
        self.rank, self.limit_s = rank, limit_s
        self._memory, self._calls = memory, calls

    def through(self, calls: Calls) -> "SharedRanks":
        return SharedRanks(self.rank, self._memory, calls, self.limit_s)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if x.dtype not in DTYPES:
            wide = None if residual is None else residual.float()
            return self.all_reduce(x.float(), wide, scale).to(x.dtype)
        return sum_over_ranks(self._calls, self._memory, x, residual, scale)

    def gather(self, x: Tensor, width: int) -> Tensor:
        return gather_columns(self._calls, self._memory, x, width)

    def check(self) -> None:
        if (missing := self._memory.missing_rank) is not None:
            raise DeviceError(f"rank {missing}: it took no part in a sum for {self.limit_s:g} s")


class SocketRanks:
    """One rank; see `pdserve.model.parallel.Collective`. The first one adds, for all.

    OSError or EOFError where another rank has ended, TimeoutError where it hangs.
    """

    device = CPU

    def __init__(self, rank: Rank, channels: Sequence[Channel], limit_s: float) -> None:
        """channels: of the first rank to all others, in their order; of another one to the first."""
        self.rank = rank
        self._channels, self._limit_s = channels, limit_s

    def through(self, calls: Calls) -> "SocketRanks":
        raise TypeError(f"{calls}: without the library there are no programs")

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if self.rank.index == 0:
            for channel in self._channels:
                x = x.add_(self._received(channel, x).view_as(x))
            for channel in self._channels:
                channel.send(_packed(x))
        else:
            (channel,) = self._channels
            channel.send(_packed(x))
            x = self._received(channel, x).view_as(x)
        total = times(x, scale)
        return total if residual is None else residual.add_(total)

    def gather(self, x: Tensor, width: int) -> Tensor:
        if self.rank.index == 0:
            others = [self._received(channel, x).view(len(x), -1) for channel in self._channels]
            return torch.cat((x, *others), 1)
        self._channels[0].send(_packed(x))
        return x.new_empty((len(x), width))

    def check(self) -> None:
        """Do nothing: what is wrong has been raised."""

    def _received(self, channel: Channel, like: Tensor) -> Tensor:
        channel.limit(self._limit_s if self.rank.index == 0 else None)  # others end with the first one
        return torch.frombuffer(bytearray(channel.receive(bytes)), dtype=like.dtype)


Ranks = SharedRanks | SocketRanks | Stages


def ranks_of(rank: Rank, slots: Tensor, channels: Sequence[Channel], limit_s: float) -> Ranks:
    """Return how a rank computes with the others, which choose alike: `load_follower` looks whether they do.

    slots: zeroed memory of `slots_bytes`, of all.
    """
    loaded = library()
    if rank.num_stages > 1:
        assert not isinstance(loaded, Missing), "`check_library` has refused that"
        pairs = slots.view(rank.num_stages - 1, -1)
        before = None if rank.is_first else RankMemory(pairs[rank.stage - 1], 1, 2, limit_s)
        behind = None if rank.is_last else RankMemory(pairs[rank.stage], 0, 2, limit_s)
        return Stages(rank, before, behind, Immediate(loaded))
    if isinstance(loaded, Missing):
        return SocketRanks(rank, channels, limit_s)
    return SharedRanks(rank, RankMemory(slots, rank.index, rank.size, limit_s), Immediate(loaded), limit_s)


def slots_bytes(degrees: Degrees) -> int:
    """Return the bytes in which all ranks meet: a slot for each, or two for each two neighbouring stages."""
    return SLOT_BYTES * (degrees.tensor if degrees.pipeline == 1 else 2 * (degrees.pipeline - 1))


def check_library(degrees: Degrees) -> None:
    """Raise ConfigError where stages cannot pass on what they make."""
    if degrees.pipeline > 1 and isinstance(library(), Missing):
        raise ConfigError(f"pipeline_parallel_size: {degrees.pipeline}: pipeline stages need the compiled C library")


def _packed(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()
