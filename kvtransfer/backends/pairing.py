"""Two processes that exchange tensors with torch.distributed: a group of two, met over one socket.

torch.distributed's own stores listen on every interface; here the socket that the two have anyway is the store.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pdserve.ids import Incarnation, WorkerId
from pdserve.kvtransfer.backends.framing import Framed
from pdserve.kvtransfer.session import Peer

SECRET_BYTES = 16
MAX_GREETING_BYTES = 1024
MEET_TIMEOUT = timedelta(seconds=5)  # a mover serves no other peer meanwhile
MAX_KEY_BYTES, MAX_VALUE_BYTES = 256, 1 << 16
WRITER, READER = 0, 1  # ranks
_NUM_TAGS = 1 << 30
_GREETING = struct.Struct(f"!{SECRET_BYTES}sQ")  # secret, incarnation; the worker's name follows


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message of a writer: it knows the secret of the region, and it is this process."""

    secret: bytes
    peer: Peer

    def encode(self) -> bytes:
        return _GREETING.pack(self.secret, self.peer.incarnation) + self.peer.worker_id.encode()

    @classmethod
    def decode(cls, data: bytes) -> "Greeting":
        """Return what a writer said; ValueError if it is no greeting."""
        if len(data) <= _GREETING.size:
            raise ValueError(f"a greeting of {len(data)} bytes")
        secret, incarnation = _GREETING.unpack_from(data)
        return cls(secret, Peer(WorkerId(data[_GREETING.size :].decode()), Incarnation(incarnation)))


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


def tag(number: int) -> int:
    """Return the tag of a page, numbered in the order in which a writer sends them."""
    return number % _NUM_TAGS


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
