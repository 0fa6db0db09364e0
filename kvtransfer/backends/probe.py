"""Measures how fast a peer is reached: writes probe memory a few times while no copy is under way.

Invariant: at most one slice of a probe is in flight, and a measurement counts only if no bytes of a copy, or of another
probe, moved from its beginning to its end.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from pdserve.kvtransfer.backends.progress import WINDOW_S
from pdserve.kvtransfer.backends.tcp_flows import bytes_acked
from pdserve.kvtransfer.mover import PairSpeed, ProbeError

SliceT = TypeVar("SliceT")
Now = Callable[[], float]

NUM_WIDE = 4  # writes of all probe memory; the first one also makes the connection
NUM_SINGLE = 4  # writes of one page
MAX_SPOILT = 32
STUCK_S = WINDOW_S  # the same as for copies


class Probe(Generic[SliceT]):
    """One probe of one peer. Its answer is set once, or cancelled by who asked."""

    def __init__(self, answer: Future[PairSpeed], pages: tuple[int, int], carrier: str, now: Now) -> None:
        """`pages`: how many there are, and the bytes of one. `carrier`: empty where it has to be found out."""
        num_pages, self._page_bytes = pages
        self._answer = answer
        self.in_flight: SliceT | None = None
        self._steps = [num_pages] * NUM_WIDE + [1] * NUM_SINGLE
        self._carrier = carrier
        self._now = now
        self._began_s = 0.0
        self._spoilt = False
        self._num_spoilt = 0
        self._taken_s: list[float] = []
        self._tcp_before = 0

    @property
    def over(self) -> bool:
        return self._answer.done() and self.in_flight is None

    @property
    def waits(self) -> bool:
        """Whether the next write may be posted."""
        return self.in_flight is None and not self._answer.done()

    def is_stuck(self, now_s: float) -> bool:
        """Whether what is in flight takes so long that the peer may be frozen."""
        return self.in_flight is not None and now_s - self._began_s > STUCK_S

    def begin(self) -> int:
        """Return how many pages to write next; the clock runs."""
        if len(self._taken_s) == 1 and not self._carrier:
            self._tcp_before = bytes_acked()
        self._spoilt = False
        self._began_s = self._now()
        return self._steps[len(self._taken_s)]

    def spoil(self) -> None:
        """Note that a copy is under way: what is being measured counts for nothing."""
        self._spoilt = True

    def landed(self) -> None:
        """Note that what `begin` named has landed."""
        self.in_flight = None
        if self._spoilt:
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
        """Give up; what is in flight stays watched."""
        if not self._answer.done() and self._answer.set_running_or_notify_cancel():
            self._answer.set_exception(ProbeError(reason))

    def _result(self) -> PairSpeed:
        wide_s, single_s = min(self._taken_s[1:NUM_WIDE]), min(self._taken_s[NUM_WIDE:])
        return PairSpeed(self._steps[0] * self._page_bytes / wide_s, single_s, self._carrier)
