"""What Linux tells of this process's TCP connections, whichever library has opened them. Elsewhere: none."""

import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BYTES_ACKED, _BYTES_RECEIVED = slice(120, 128), slice(128, 136)  # of struct tcp_info
_OPEN_FILES = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class Flow:
    """What a connection has carried in all its life, and how much of what came nobody has read."""

    acked: int = 0  # bytes sent that the other end has acknowledged
    received: int = 0
    num_unread: int = 0

    def is_before(self, mark: int) -> bool:
        """Return whether received bytes up to a mark are unread. More may have come behind them."""
        return self.num_unread > 0 and self.received - self.num_unread < mark


def flows() -> dict[int, Flow]:
    """Return the flow of every open file, by its number."""
    try:
        numbers = [int(name) for name in os.listdir(_OPEN_FILES)]
    except OSError:
        return {}
    return {number: flow(number) for number in numbers}


def flow(number: int) -> Flow:
    """Look at an open file; an empty flow for what is no TCP connection, or is closed by now."""
    with suppress(OSError):
        if not os.readlink(_OPEN_FILES / str(number)).startswith("socket:"):
            return Flow()
        with socket.socket(fileno=os.dup(number)) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
            (num_unread,) = struct.unpack("i", fcntl.ioctl(copy, termios.FIONREAD, bytes(4)))
        acked, received = (int.from_bytes(info[part], "little") for part in (_BYTES_ACKED, _BYTES_RECEIVED))
        return Flow(acked, received, num_unread)
    return Flow()


def bytes_acked() -> int:
    """Return what peers have acknowledged over all connections open now: tells a lane that has fallen back to TCP."""
    return sum(each.acked for each in flows().values())
