"""How fast bytes reach a peer: notices that its transfers hardly move, and measures its bandwidth on request.

Linux reports of this process's TCP connections, whichever library has opened them. Elsewhere: none.
"""

import asyncio
import fcntl
import logging
import os
import socket
import struct
import termios
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.base.ids import Peer

logger = logging.getLogger(__name__)

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
    """Return when everything that this process's TCP sockets have received by now has been read.

    A process that has ended writes no more. But over TCP, what it had written may still wait in a socket here: a page
    is not safe before that has been read. (Seen: 4 MiB that landed up to 20 ms after a frozen receiver was thawed.)
    """
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


WINDOW_S = 2.0
FLOOR_BYTES_PER_S = 4e6

NUM_WIDE = 4  # writes of all probe memory; the first one also makes the connection
NUM_SINGLE = 4  # writes of one page
MAX_SPOILT = 32
STUCK_S = WINDOW_S  # the same as for copies
PROBE_TIMEOUT_S = 30.0  # copies come first: on a busy worker it may never be a probe's turn
MAX_MET = 4096


class StallDetector:
    """Notices that a peer's transfers hardly move. Pure.

    Invariant: a peer is stalled from the end of a window with bytes in flight all the time in which fewer than the
    floor landed, until a window in which enough landed or until nothing is in flight. Idle time never counts. A stall
    is reported; it ends no copy.
    """

    def __init__(self) -> None:
        self.is_stalled = False
        self.bytes_in_flight = 0
        self._since_s = 0.0  # the window's beginning
        self._landed = 0  # bytes, in the window

    def posted(self, num_bytes: int, now_s: float) -> None:
        if not self.bytes_in_flight:
            self._open(now_s)
        self.bytes_in_flight += num_bytes

    def ended(self, num_bytes: int, *, landed: bool) -> None:
        self.bytes_in_flight -= num_bytes
        self._landed += num_bytes if landed else 0
        if not self.bytes_in_flight:
            self.is_stalled = False

    def has_stalled(self, now_s: float) -> bool:
        """Judge the window if it is over; return whether the peer has become stalled by that."""
        elapsed_s = now_s - self._since_s
        if not self.bytes_in_flight or elapsed_s < WINDOW_S:
            return False
        was_stalled = self.is_stalled
        self.is_stalled = self._landed < FLOOR_BYTES_PER_S * elapsed_s
        self._open(now_s)
        return self.is_stalled and not was_stalled

    def _open(self, now_s: float) -> None:
        self._since_s, self._landed = now_s, 0


class ProbeError(Exception):
    """A pair could not be measured. Its copies go on as if nothing had been asked."""


@dataclass(frozen=True, slots=True)
class PairSpeed:
    """How fast one process's memory reaches another's, measured while nothing else was copied."""

    bytes_per_s: float
    page_s: float  # for one page by itself
    carrier: str  # "memory", "tcp", "not tcp": as far as it can be known
    is_slow: bool = False  # slower than an operator expects


class Probe:
    """Measures one peer, by writing probe memory a few times. Its answer is set once, or cancelled by who asked.

    A measurement counts only if no bytes of a copy, or of another probe, moved from its beginning to its end.
    """

    def __init__(
        self, answer: Future[PairSpeed], pages: tuple[int, int], carrier: str, now: Callable[[], float]
    ) -> None:
        """`pages`: how many there are, and the bytes of one. `carrier`: empty where it has to be found out."""
        num_pages, self._page_bytes = pages
        self._answer = answer
        self._steps = [num_pages] * NUM_WIDE + [1] * NUM_SINGLE
        self._carrier = carrier
        self._now = now
        self._began_s = 0.0
        self._is_spoilt = False
        self._num_spoilt = 0
        self._taken_s: list[float] = []
        self._tcp_before = 0

    @property
    def is_over(self) -> bool:
        return self._answer.done()

    def is_stuck(self, now_s: float) -> bool:
        """Return whether a write in flight takes so long that the peer may be frozen."""
        return now_s - self._began_s > STUCK_S

    def begin(self) -> int:
        """Return how many pages to write next; the clock runs."""
        if len(self._taken_s) == 1 and not self._carrier:
            self._tcp_before = bytes_acked()
        self._is_spoilt = False
        self._began_s = self._now()
        return self._steps[len(self._taken_s)]

    def spoil(self) -> None:
        """Note that other bytes are moving: the present measurement does not count."""
        self._is_spoilt = True

    def landed(self) -> None:
        """Note that what `begin` named has landed."""
        if self._is_spoilt:
            self._num_spoilt += 1
            if self._num_spoilt == MAX_SPOILT:
                self.fail("copies were under way all the time")
            return
        self._taken_s.append(max(self._now() - self._began_s, 1e-9))
        if len(self._taken_s) == NUM_WIDE and not self._carrier:
            sent = bytes_acked() - self._tcp_before
            self._carrier = "tcp" if sent >= (NUM_WIDE - 1) * self._steps[0] * self._page_bytes // 2 else "not tcp"
        if len(self._taken_s) == len(self._steps) and self._answer.set_running_or_notify_cancel():
            self._answer.set_result(self._result())

    def fail(self, reason: str) -> None:
        """Give up. A write that is in flight must still be watched to its end."""
        if not self._answer.done() and self._answer.set_running_or_notify_cancel():
            self._answer.set_exception(ProbeError(reason))

    def _result(self) -> PairSpeed:
        wide_s, single_s = min(self._taken_s[1:NUM_WIDE]), min(self._taken_s[NUM_WIDE:])
        return PairSpeed(self._steps[0] * self._page_bytes / wide_s, single_s, self._carrier)


ProbePeer = Callable[[Peer], Future[PairSpeed]]  # `Mover.probe`
Report = Callable[[str, PairSpeed | None], None]  # of the receiver with this worker id; None: what was reported is over


class Probes:
    """Probes each receiver once, when it is first met. Whatever becomes of the probe, the pair works on."""

    def __init__(self, probe: ProbePeer, report: Report, tasks: asyncio.TaskGroup, slow_bytes_per_s: int) -> None:
        self._probe = probe
        self._report = report
        self._tasks = tasks
        self._slow_bytes_per_s = slow_bytes_per_s
        self._met: OrderedDict[Peer, asyncio.Task[None]] = OrderedDict()

    def start(self, peer: Peer) -> None:
        if peer in self._met:
            return
        self._met[peer] = self._tasks.create_task(self._measure(peer), name=f"probe {peer.worker_id}")
        if len(self._met) > MAX_MET:
            self.forget(next(iter(self._met)))

    def forget(self, peer: Peer) -> None:
        """Drop what is known of a peer, if it was met."""
        task = self._met.pop(peer, None)
        if task is None:
            return
        task.cancel()
        if all(other.worker_id != peer.worker_id for other in self._met):
            self._report(peer.worker_id, None)

    def close(self) -> None:
        for task in self._met.values():
            task.cancel()

    async def _measure(self, peer: Peer) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                speed = await asyncio.wrap_future(self._probe(peer))
        except (ProbeError, TimeoutError) as error:
            logger.warning(
                "the way to %s was not measured: %s", peer.worker_id, str(error) or "there were always copies"
            )
            return
        is_slow = speed.bytes_per_s < self._slow_bytes_per_s
        level = logging.WARNING if is_slow else logging.INFO
        logger.log(level, "%s%s", "SLOW: " if is_slow else "", _describe(peer, speed, self._slow_bytes_per_s))
        self._report(peer.worker_id, replace(speed, is_slow=is_slow))


def _describe(peer: Peer, speed: PairSpeed, floor: int) -> str:
    return (
        f"pages reach {peer.worker_id} at {speed.bytes_per_s / 1e6:.0f} MB/s, one page in {1e6 * speed.page_s:.0f} us, "
        f"carrier: {speed.carrier}; {floor / 1e6:.0f} MB/s are expected"
    )
