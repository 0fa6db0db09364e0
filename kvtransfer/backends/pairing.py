"""Two processes on one socket: they exchange messages, prove the secret to each other, and become a gloo group of two.

torch.distributed's own stores listen on every interface. Here the socket that the two share is the store.
"""

import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.net.secret_proof import NONCE_BYTES, PROOF_BYTES, is_proof, new_nonce, proof_of

REGION_BYTES = 16
MAX_GREETING_BYTES = 1024
GREETING_TIMEOUT_S = 5.0
MEET_TIMEOUT = timedelta(seconds=5)  # a mover serves no other peer meanwhile
FOREVER = timedelta(days=365)  # how long a frozen writer is waited for
MAX_KEY_BYTES, MAX_VALUE_BYTES = 256, 1 << 16
WRITER, READER = 0, 1  # ranks
_LENGTH = struct.Struct("!I")
_SEND_TIMEOUT = struct.pack("ll", 5, 0)  # a struct timeval
_NUM_TAGS = 1 << 30
_GREETING = struct.Struct(f"!{REGION_BYTES}s{NONCE_BYTES}sQ")  # the worker's name follows


class Framed:
    """One end of a connected socket. Messages are read by one thread and sent by one thread."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self._socket = connected
        self._until_s: float | None = None

    @property
    def local_host(self) -> str:
        host: str = self._socket.getsockname()[0]
        return host

    def limit(self, seconds: float | None) -> None:
        """Raise TimeoutError where all that is received from here on takes longer than this; None: wait for ever."""
        self._until_s = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(seconds)

    def send(self, message: bytes) -> None:
        """Send a message; OSError where the other end is gone or does not read."""
        self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self, max_bytes: int) -> bytes:
        """Wait for a message; OSError at the end of the stream, or where a message is too long."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > max_bytes:
            raise OSError(f"a message of {length} bytes, {max_bytes} are allowed")
        return self._exactly(length)

    def send_byte(self) -> None:
        """Send one byte outside of messages: the other end counts them."""
        self._socket.sendall(b"+")

    def count_bytes(self) -> int:
        """Return how many single bytes have come since the last call; OSError at the end of the stream."""
        try:
            received = self._socket.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        if not received:
            raise OSError("it ended the connection")
        return len(received)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            if self._until_s is not None:
                left_s = self._until_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("its message takes too long")
                self._socket.settimeout(left_s)
            part = self._socket.recv(min(count - len(received), 1 << 16))
            if not part:
                raise OSError("it ended the connection")
            received += part
        return bytes(received)


@dataclass(frozen=True, slots=True)
class Meeting:
    """How writers and receivers find and recognize each other."""

    secret: bytes = field(repr=False)  # of the cluster
    host: str = "127.0.0.1"  # the receiver listens on it
    advertised: str = ""  # the host that writers connect to, if it is another


@dataclass(frozen=True, slots=True)
class Greeting:
    """A writer's first message: which region it means, and which process it is."""

    region: bytes
    peer: Peer
    nonce: bytes = field(default_factory=new_nonce)

    def encode(self) -> bytes:
        return _GREETING.pack(self.region, self.nonce, self.peer.incarnation) + self.peer.worker_id.encode()

    @classmethod
    def decode(cls, data: bytes) -> "Greeting":
        if len(data) <= _GREETING.size:
            raise ValueError(f"a greeting of {len(data)} bytes")
        region, nonce, incarnation = _GREETING.unpack_from(data)
        return cls(region, Peer(WorkerId(data[_GREETING.size :].decode()), Incarnation(incarnation)), nonce)


def greet(framed: Framed, secret: bytes, greeting: Greeting) -> None:
    """Prove to a receiver that this writer knows the cluster's secret; OSError unless the receiver proves the same."""
    framed.limit(GREETING_TIMEOUT_S)
    challenge, encoded = framed.receive(NONCE_BYTES), greeting.encode()
    framed.send(encoded + proof_of(secret, "collective writer", challenge, encoded))
    if not is_proof(framed.receive(PROOF_BYTES), secret, "collective receiver", challenge, encoded):
        raise OSError("it does not know the cluster's secret")


def be_greeted(framed: Framed, secret: bytes, region: bytes) -> Peer:
    """Return which process a writer is; OSError or ValueError unless it proves itself, and means this region."""
    framed.limit(GREETING_TIMEOUT_S)
    challenge = new_nonce()
    framed.send(challenge)
    received = framed.receive(MAX_GREETING_BYTES)
    encoded, proof = received[:-PROOF_BYTES], received[-PROOF_BYTES:]
    if not is_proof(proof, secret, "collective writer", challenge, encoded):
        raise OSError("it does not know the cluster's secret")
    greeting = Greeting.decode(encoded)
    if greeting.region != region:
        raise OSError("it means the pages of another process")
    framed.send(proof_of(secret, "collective receiver", challenge, encoded))
    return greeting.peer


class _SocketStore(c10d.Store):
    """A store of two processes: each gets what the other one sets. Used while they meet, by one thread."""

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


class Pair:
    """A gloo group of two processes. What one sends, the other has to receive in the same order."""

    def __init__(self, group: Any, rank: int) -> None:  # noqa: ANN401 - the stubs of torch lack what it can do
        self._group = group
        self._other = 1 - rank
        self._num_rows = 0  # sent or received: gloo matches them by a tag

    def send(self, rows: Sequence[Tensor]) -> tuple[c10d.Work, ...]:
        """Start to send rows; RuntimeError if the other end is gone. What is returned must be kept until they land."""
        return tuple(self._group.send([row], self._other, self._next_tag()) for row in rows)

    def receive(self, rows: Sequence[Tensor]) -> None:
        """Receive rows where they lie; blocks however long the other end is frozen. RuntimeError if it is gone."""
        for work in [self._group.recv([row], self._other, self._next_tag()) for row in rows]:
            work.wait(FOREVER)

    def _next_tag(self) -> int:
        tag, self._num_rows = self._num_rows % _NUM_TAGS, self._num_rows + 1
        return tag


def meet(framed: Framed, rank: int) -> Pair:
    """Return the pair of this process and the one at the other end; OSError or RuntimeError if it cannot be had.

    Its connections run between the addresses that the socket runs between.
    """
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = MEET_TIMEOUT
    options._devices = [gloo.create_device(hostname=framed.local_host)]
    framed.limit(MEET_TIMEOUT.total_seconds())
    group = gloo(_SocketStore(framed), rank, 2, options)
    framed.limit(None)
    return Pair(group, rank)
