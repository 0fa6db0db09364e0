"""Two processes that exchange tensors with torch.distributed: a group of two, met over one socket.

torch.distributed's own stores listen on every interface; here the socket that the two have anyway is the store.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pdserve.ids import Incarnation, WorkerId
from pdserve.kvtransfer.backends.framing import Framed
from pdserve.kvtransfer.session import Peer
from pdserve.proof import NONCE_BYTES, PROOF_BYTES, is_proof, new_nonce, proof_of

REGION_BYTES = 16
MAX_GREETING_BYTES = 1024
GREETING_TIMEOUT_S = 5.0
MEET_TIMEOUT = timedelta(seconds=5)  # a mover serves no other peer meanwhile
MAX_KEY_BYTES, MAX_VALUE_BYTES = 256, 1 << 16
WRITER, READER = 0, 1  # ranks
_NUM_TAGS = 1 << 30
_GREETING = struct.Struct(f"!{REGION_BYTES}s{NONCE_BYTES}sQ")  # the worker's name follows


@dataclass(frozen=True, slots=True)
class Meeting:
    """How writers and receivers find and know each other."""

    secret: bytes = field(repr=False)  # of the cluster
    host: str = "127.0.0.1"  # on which writers are awaited
    told: str = ""  # the host that writers are told, if it is another


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a writer says of itself: which region it means, and which process it is."""

    region: bytes
    peer: Peer
    nonce: bytes = field(default_factory=new_nonce)

    def encode(self) -> bytes:
        return _GREETING.pack(self.region, self.nonce, self.peer.incarnation) + self.peer.worker_id.encode()

    @classmethod
    def decode(cls, data: bytes) -> "Greeting":
        """Return what a writer said; ValueError if it is no greeting."""
        if len(data) <= _GREETING.size:
            raise ValueError(f"a greeting of {len(data)} bytes")
        region, nonce, incarnation = _GREETING.unpack_from(data)
        return cls(region, Peer(WorkerId(data[_GREETING.size :].decode()), Incarnation(incarnation)), nonce)


def greet(framed: Framed, secret: bytes, greeting: Greeting) -> None:
    """Prove to a receiver that this writer knows the cluster's secret; OSError unless the receiver proves the same."""
    framed.limit(GREETING_TIMEOUT_S)
    challenge, said = framed.receive(NONCE_BYTES), greeting.encode()
    framed.send(said + proof_of(secret, "collective writer", challenge, said))
    if not is_proof(framed.receive(PROOF_BYTES), secret, "collective receiver", challenge, said):
        raise OSError("it does not know the cluster's secret")


def be_greeted(framed: Framed, secret: bytes, region: bytes) -> Peer:
    """Return which process a writer is; OSError or ValueError unless it proves itself, and means this region."""
    framed.limit(GREETING_TIMEOUT_S)
    challenge = new_nonce()
    framed.send(challenge)
    shown = framed.receive(MAX_GREETING_BYTES)
    said, proof = shown[:-PROOF_BYTES], shown[-PROOF_BYTES:]
    if not is_proof(proof, secret, "collective writer", challenge, said):
        raise OSError("it does not know the cluster's secret")
    greeting = Greeting.decode(said)
    if greeting.region != region:
        raise OSError("it means the pages of another process")
    framed.send(proof_of(secret, "collective receiver", challenge, said))
    return greeting.peer


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
        del timeout  # the socket has a limit
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
    framed.limit(MEET_TIMEOUT.total_seconds())
    group: Group = gloo(_SocketStore(framed), rank, 2, options)
    framed.limit(None)
    return group
