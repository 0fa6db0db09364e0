"""When a worker may send heartbeats, and how its process ends when it may not.

Invariant: a worker sends heartbeats only while its loop has turned within `stalled_s`, however long the process has
been there, and every thread that is watched has come round within its time.
"""

import logging
import os

from pdserve.kvtransfer.doors import HEARTBEAT_S

logger = logging.getLogger(__name__)

HUNG_EXIT_STATUS = 70  # EX_SOFTWARE: a thread hangs
DISMISSED_EXIT_STATUS = 77  # EX_NOPERM: this process is known to have ended, or has a successor


def end_process(status: int, why: str) -> None:
    """End this process at once, so that it writes into no other worker's pages any more.

    Nothing is cleaned up: a thread that hangs cannot be ended, copies cannot be recalled, and only the end of the
    process stops them.
    """
    logger.critical("%s: this process ends", why)
    os._exit(status)


class LoopWatchdog:
    """Watches one loop: it turns between steps, and may stand still while a step runs."""

    def __init__(self, stalled_s: float, now_s: float) -> None:
        self._stalled_s = stalled_s
        self._turned_s = now_s
        self._beaten_s = now_s
        self._longest_s = 0.0

    def turn(self, now_s: float) -> None:
        self._turned_s = now_s

    def beat(self, now_s: float) -> bool:
        """Return whether to send a heartbeat, and note how long none was sent before."""
        if now_s - self._turned_s > self._stalled_s:
            return False
        self._longest_s = max(self._longest_s, now_s - self._beaten_s)
        self._beaten_s = now_s
        return True

    def take_silence_s(self) -> float:
        """Return the longest silence since this was last asked."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


class ThreadWatchdog:
    """Watches a thread that comes round by itself as long as it has something to do."""

    def __init__(self, hung_s: float, now_s: float) -> None:
        self._hung_s = hung_s
        self._looked_s = now_s
        self._turn: int | None = None
        self._still_s = 0.0

    def look(self, turn: int | None, now_s: float) -> bool:
        """Return whether the thread goes on; called at each beat. `turn` changes while it works; None: it rests.

        If nobody asked for longer than two beats, this process was frozen, and so was the thread: two beats count.
        """
        awake_s = min(now_s - self._looked_s, 2 * HEARTBEAT_S)
        self._looked_s = now_s
        is_still = turn is not None and turn == self._turn
        self._still_s = self._still_s + awake_s if is_still else 0.0
        self._turn = turn
        return self._still_s <= self._hung_s
