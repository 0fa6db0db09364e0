"""Messages on a socket: a length, then so many bytes."""

import socket
import struct
import time
from contextlib import suppress

_LENGTH = struct.Struct("!I")
_SEND_TIMEOUT = struct.pack("ll", 5, 0)  # a struct timeval


class Framed:
    """One end of a connected socket. Messages are read by one thread and sent by one thread."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self._socket = connected
        self._until_s: float | None = None

    @property
    def local_host(self) -> str:
        """Return the address of this end."""
        host: str = self._socket.getsockname()[0]
        return host

    def limit(self, seconds: float | None) -> None:
        """Have all that is received from now on be there within a time, TimeoutError else; None: take any time."""
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
        """Send one byte that is no message: the other end counts them."""
        self._socket.sendall(b"+")

    def count_bytes(self) -> int:
        """Return how many single bytes have come since the last look; OSError at the end of the stream."""
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
                    raise TimeoutError("it says too little in too much time")
                self._socket.settimeout(left_s)
            part = self._socket.recv(min(count - len(received), 1 << 16))
            if not part:
                raise OSError("it ended the connection")
            received += part
        return bytes(received)
