"""Two processes that exchange tensors with torch.distributed: a group of two, met over one socket.

torch.distributed's own stores listen on every interface; here the socket that the two have anyway is the store.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pdserve.kvtransfer.backends.framing import Framed

MEET_TIMEOUT = timedelta(seconds=5)  # a mover serves no other peer meanwhile
MAX_KEY_BYTES, MAX_VALUE_BYTES = 256, 1 << 16
WRITER, READER = 0, 1  # ranks


class Work(Protocol):
    """A tensor on its way. Both ends keep it until it has arrived."""

    def wait(self, timeout: timedelta) -> bool: ...


class Group(Protocol):
    """Two processes. What the one sends under a tag, the other has to ask for under the same tag."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...


class _SocketStore(c10d.Store):
    """What each of the two sets, the other one gets. Used while they meet, by one thread."""

    def __init__(self, framed: Framed) -> None:
        super().__init__()
        self._framed = framed
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo's values are bytes
        self._values[key] = value
        self._framed.send(key.encode())
        self._framed.send(value)

    def get(self, key: str) -> bytes:
        while key not in self._values:
            name = self._framed.receive(MAX_KEY_BYTES).decode()
            self._values[name] = self._framed.receive(MAX_VALUE_BYTES)
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta = MEET_TIMEOUT) -> None:
        del timeout  # the socket has one
        for key in keys:
            self.get(key)


def meet(framed: Framed, rank: int) -> Group:
    """Return the group of this process and the one at the other end; OSError or RuntimeError if it cannot be had.

    Its connections run between the addresses that the socket runs between.
    """
    gloo: Any = c10d.ProcessGroupGloo  # the stubs know less than it has
    options = gloo._Options()
    options._timeout = MEET_TIMEOUT
    options._devices = [gloo.create_device(hostname=framed.local_host)]
    framed.set_timeout(MEET_TIMEOUT.total_seconds())
    group: Group = gloo(_SocketStore(framed), rank, 2, options)
    framed.set_timeout(None)
    return group
