"""A writer to the mover over torch.distributed that stops in the middle of a slice, and goes on when it is told to."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch

from pdserve.base.ids import Peer
from pdserve.kvtransfer.backends.pairing import REGION_BYTES, WRITER, Framed, Greeting, Meeting, Pair, greet, meet
from pdserve.kvtransfer.region import Description

TIMEOUT = timedelta(seconds=10)
MEETING = Meeting(b"s" * 32)


class HalfSlice:
    """Pages 0 and 1 are named and page 0 has been sent; page 1 is not before `send_rest`."""

    def __init__(self, connected: socket.socket, pair: Pair, page_bytes: int, taker: threading.Thread) -> None:
        self._socket = connected
        self._pair = pair
        self._page = torch.ones(page_bytes, dtype=torch.uint8)
        self._taker = taker  # the receiver's thread for this writer, in this process
        Framed(connected).send((0).to_bytes(4, "big") + (1).to_bytes(4, "big"))
        self._send_page()

    def send_rest(self) -> bool:
        """Send page 1 too; returns whether the slice was put in its place, once it was, or never will be."""
        self._send_page()
        self._socket.settimeout(TIMEOUT.total_seconds())
        with suppress(ConnectionError):
            if self._socket.recv(1):
                return True
        self._taker.join(TIMEOUT.total_seconds())
        assert not self._taker.is_alive()
        return False

    def _send_page(self) -> None:
        (work,) = self._pair.send([self._page])
        work.wait(TIMEOUT)


def greeted(description: bytes, me: Peer) -> socket.socket:
    """Connect to a receiver and say who one is."""
    metadata = Description.decode(description).metadata
    host, _, port = metadata[REGION_BYTES:].decode().rpartition(":")
    connected = socket.create_connection((host, int(port)), 5)
    greet(Framed(connected), MEETING.secret, Greeting(metadata[:REGION_BYTES], me))
    return connected


@contextmanager
def half_slice(description: bytes, me: Peer) -> Iterator[HalfSlice]:
    """Write half a slice to a receiver in this process."""
    with greeted(description, me) as connected:
        name = f"writer {connected.getsockname()}"
        pair = meet(Framed(connected), WRITER)
        taker = next(thread for thread in threading.enumerate() if thread.name == name)
        yield HalfSlice(connected, pair, Description.decode(description).page_bytes, taker)
