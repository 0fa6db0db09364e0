"""When a worker may say that it lives. Decides; does no I/O.

Invariant: it says so only while its loop has turned within `stalled_s`, however long the process has been there.
"""


class Pulse:
    """Watches one loop: it turns between steps, and may stand still while a step runs."""

    def __init__(self, stalled_s: float, now_s: float) -> None:
        self._stalled_s = stalled_s
        self._turned_s = now_s
        self._beaten_s = now_s
        self._longest_s = 0.0

    def turn(self, now_s: float) -> None:
        """Note that the loop goes on."""
        self._turned_s = now_s

    def beat(self, now_s: float) -> bool:
        """Return whether to say that this worker lives, and note how long nothing was said before."""
        if now_s - self._turned_s > self._stalled_s:
            return False
        self._longest_s = max(self._longest_s, now_s - self._beaten_s)
        self._beaten_s = now_s
        return True

    def take_silence_s(self) -> float:
        """Return the longest silence since this was last asked."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s
