"""How ranks of several machines add: a group of gloo over TCP, on the interface that each machine's operator names.

The connections of the group ask nobody who they are. The addresses of their listeners are told over the channels on
which rank 0 sends steps, which are authenticated: none of torch's own stores listens.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import msgspec
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pdserve.executor.rank_group import GroupRanks
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel


class StoreCall(msgspec.Struct, array_like=True):
    """What a rank asks of the store of rank 0; an answer follows."""

    name: str  # set, get, or met: the rank needs it no more
    key: str = ""
    value: bytes = b""


class NodeRanks(GroupRanks):
    """One rank on a CPU; see `pdserve.model.parallel.Collective`. Sums are float32's, the same on all ranks to the bit.

    RuntimeError where another rank has ended, or takes longer than the limit.
    """

    def __init__(self, rank: Rank, host: str) -> None:
        """host: this machine's address in the network of sums."""
        super().__init__(rank, torch.device("cpu"), host)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if x.dtype == torch.float32:
            return super().all_reduce(x, residual, scale)
        wide = None if residual is None else residual.float()
        return super().all_reduce(x.float(), wide, scale).to(x.dtype)


class ChannelStore(c10d.Store):
    """The store of rank 0, over a channel to it. Used while ranks meet, by one thread."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo's values are bytes
        self._ask(StoreCall("set", key, value))

    def get(self, key: str) -> bytes:
        return self._ask(StoreCall("get", key))

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta()) -> None:
        del timeout  # rank 0 has a limit
        for key in keys:
            self.get(key)

    def close(self) -> None:
        """Let rank 0 use the channel for steps again."""
        self._ask(StoreCall("met"))

    def _ask(self, call: StoreCall) -> bytes:
        self._channel.send(call)
        return self._channel.receive(bytes)


def join_group(ranks: GroupRanks, slots: int | None, channel: Channel, limit_s: float) -> None:
    """Join the group of all ranks. slots: of memory that all have inherited; None: they are on several machines."""
    if slots is not None:
        ranks.join(slots, limit_s)
        return
    store = ChannelStore(channel)
    ranks.meet(store, limit_s)
    store.close()


@contextmanager
def store_for(channels: Sequence[Channel], limit_s: float) -> Iterator[c10d.Store]:
    """Serve a store to ranks for the length of the block, until each has met the others, or is gone."""
    store = c10d.HashStore()
    store.set_timeout(timedelta(seconds=limit_s))
    threads = [threading.Thread(target=_serve, args=(channel, store), daemon=True) for channel in channels]
    for each in threads:
        each.start()
    yield store
    for each in threads:
        each.join()


def _serve(channel: Channel, store: c10d.Store) -> None:
    call = StoreCall("")
    with suppress(OSError, EOFError, RuntimeError):  # a rank is gone, as whoever waits for it finds out
        while call.name != "met":
            call = channel.receive(StoreCall)
            if call.name == "set":
                store.set(call.key, call.value)  # type: ignore[arg-type]  # bytes do
            channel.send(bytes(store.get(call.key)) if call.name == "get" else b"")
