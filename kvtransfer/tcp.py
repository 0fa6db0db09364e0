"""What Linux reports of this process's TCP connections, whichever library has opened them. Elsewhere: none.

A process that has ended writes no more. But over TCP, what it had written may still wait in a socket here: a page is
not safe before that has been read. (Seen: 4 MiB that landed up to 20 ms after a frozen receiver was thawed.)
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

LOOK_AGAIN_S = 0.002  # no event says that another thread has read a socket

_BYTES_ACKED, _BYTES_RECEIVED = slice(120, 128), slice(128, 136)  # of struct tcp_info
_OPEN_FILES = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class Flow:
    """What a connection has carried in all its life, and how much of what it received is unread."""

    acked: int = 0  # bytes sent that the other end has acknowledged
    received: int = 0
    num_unread: int = 0

    def has_unread_before(self, mark: int) -> bool:
        """Return whether any of the first `mark` received bytes is unread. More may have come after them."""
        return self.num_unread > 0 and self.received - self.num_unread < mark


async def until_read() -> None:
    """Return when everything that this process's TCP sockets have received by now has been read."""
    waiting = {number: each.received for number, each in _flows().items() if each.num_unread}
    while waiting:
        await asyncio.sleep(LOOK_AGAIN_S)
        waiting = {number: mark for number, mark in waiting.items() if _flow(number).has_unread_before(mark)}


def bytes_acked() -> int:
    """Return what peers have acknowledged over all open connections: shows when a library has fallen back to TCP."""
    return sum(each.acked for each in _flows().values())


def _flows() -> dict[int, Flow]:
    try:
        numbers = [int(name) for name in os.listdir(_OPEN_FILES)]
    except OSError:
        return {}
    return {number: _flow(number) for number in numbers}


def _flow(number: int) -> Flow:
    """Look at an open file; an empty flow for what is no TCP connection, or has been closed."""
    with suppress(OSError):
        if not os.readlink(_OPEN_FILES / str(number)).startswith("socket:"):
            return Flow()
        with socket.socket(fileno=os.dup(number)) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
            (num_unread,) = struct.unpack("i", fcntl.ioctl(copy, termios.FIONREAD, bytes(4)))
        acked, received = (int.from_bytes(info[part], "little") for part in (_BYTES_ACKED, _BYTES_RECEIVED))
        return Flow(acked, received, num_unread)
    return Flow()
