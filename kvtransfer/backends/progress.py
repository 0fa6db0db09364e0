"""Notices that a peer's transfers hardly move. Pure.

Invariant: a peer is stalled from the end of a window, all of it with bytes in flight, in which fewer landed than the
floor asks for, until a window in which enough did, or until nothing is in flight. Time without anything to send never
counts. Being stalled is news, no decision: it makes no copy end.
"""

WINDOW_S = 2.0
FLOOR_BYTES_PER_S = 4e6


class Progress:
    """What is in flight to one peer, and what has landed of late."""

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
        """Note that bytes are no longer in flight."""
        self.bytes_in_flight -= num_bytes
        self._landed += num_bytes if landed else 0
        if not self.bytes_in_flight:
            self.is_stalled = False

    def look(self, now_s: float) -> bool:
        """Judge a window that is over; return whether the peer has become stalled by that."""
        elapsed_s = now_s - self._since_s
        if not self.bytes_in_flight or elapsed_s < WINDOW_S:
            return False
        was_stalled = self.is_stalled
        self.is_stalled = self._landed < FLOOR_BYTES_PER_S * elapsed_s
        self._open(now_s)
        return self.is_stalled and not was_stalled

    def _open(self, now_s: float) -> None:
        self._since_s, self._landed = now_s, 0
