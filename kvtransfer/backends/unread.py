"""Waits until what others have sent to this process has been read from its sockets.

A process that has ended writes no more, but over TCP what it had written may still wait in a socket here: a page it
was meant for is not safe before that has been read too. (Seen: 4 MiB, landing up to 20 ms after the receiver thawed.)
"""

import asyncio
import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOOK_AGAIN_S = 0.002  # no event tells that somebody else has read a socket
_BYTES_RECEIVED = slice(128, 136)  # of Linux' struct tcp_info
_OPEN_FILES = Path("/proc/self/fd")


async def until_read() -> None:
    """Return when all that has reached this process's TCP sockets by now has been read; at once where none can tell."""
    waiting = {number: flow.received for number in _open_files() if (flow := _flow(number)).num_unread}
    while waiting:
        await asyncio.sleep(LOOK_AGAIN_S)
        waiting = {number: mark for number, mark in waiting.items() if _flow(number).is_before(mark)}


@dataclass(frozen=True, slots=True)
class _Flow:
    """What a TCP socket has received in all its life, and how much of that nobody has read."""

    received: int = 0
    num_unread: int = 0

    def is_before(self, mark: int) -> bool:
        """Return whether bytes up to a mark are unread. More may have come behind them."""
        return self.num_unread > 0 and self.received - self.num_unread < mark


def _open_files() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_OPEN_FILES)]
    except OSError:
        return []


def _flow(number: int) -> _Flow:
    """Look at a socket; an empty flow for what is no TCP connection, or is closed by now."""
    with suppress(OSError):
        if not os.readlink(_OPEN_FILES / str(number)).startswith("socket:"):
            return _Flow()
        with socket.socket(fileno=os.dup(number)) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
            (num_unread,) = struct.unpack("i", fcntl.ioctl(copy, termios.FIONREAD, bytes(4)))
        return _Flow(int.from_bytes(info[_BYTES_RECEIVED], "little"), num_unread)
    return _Flow()
