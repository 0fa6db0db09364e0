"""Packed messages over a connected socket between two processes of one worker."""

import asyncio
import socket
import struct
from typing import TypeVar

import msgspec

MAX_BYTES = 1 << 30
_LENGTH = struct.Struct("!I")

Message = TypeVar("Message")


def packed(message: msgspec.Struct | bytes) -> bytes:
    """Return a message as it is sent."""
    content = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(content)) + content


def whole_frame(received: bytes | bytearray) -> bytes | None:
    """Return the one message that so many bytes are, still packed; None if some are missing."""
    size = _LENGTH.size
    if len(received) < size or len(received) - size < _LENGTH.unpack_from(received)[0]:
        return None
    return bytes(received[size:])


async def next_frame(reader: asyncio.StreamReader) -> bytes:
    """Wait for a message, still packed; EOFError at the end of the stream."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(min(length, MAX_BYTES))


class Channel:
    """One end of a socket; each message is read by one thread, and written by one."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, message: msgspec.Struct | bytes) -> None:
        """Send a message; OSError where the other end is gone."""
        self._socket.sendall(packed(message))

    def limit(self, seconds: float | None) -> None:
        """Raise TimeoutError where a message takes longer; the channel is of no use then. None: wait for ever."""
        self._socket.settimeout(seconds)

    def receive(self, kind: type[Message]) -> Message:
        """Wait for a message; EOFError at the end of the stream, OSError where the other end is gone."""
        return msgspec.msgpack.decode(self.next_frame(), type=kind)

    def next_frame(self) -> bytearray:
        """Wait for a message, still packed; EOFError at the end of the stream, OSError where the other end is gone."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(min(length, MAX_BYTES))

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, count: int) -> bytearray:
        received = bytearray(count)
        view = memoryview(received)
        while view:
            length = self._socket.recv_into(view)
            if not length:
                raise EOFError
            view = view[length:]
        return received
