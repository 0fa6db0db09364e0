"""What is due when. Alarms are not taken back: who rings finds out that nothing needs doing."""

from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from math import inf

from pdserve.ids import RequestId
from pdserve.values import value


@value
class DeadlineDue:
    request_id: RequestId


@value
class LookDue:
    """A request that waits may no longer be able to meet its objectives."""

    request_id: RequestId


@value
class RetryDue:
    """These continuations of a request are to be placed again."""

    request_id: RequestId
    indices: tuple[int, ...]
    cause: str  # of the failure, in words


Alarm = DeadlineDue | LookDue | RetryDue


class Alarms:
    """A heap of alarms, rid of those of ended requests whenever these are the larger part."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Alarm]] = []
        self._count = 0  # breaks ties, so that alarms themselves are never compared

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_s: float, alarm: Alarm) -> None:
        self._count += 1
        heappush(self._heap, (at_s, self._count, alarm))

    def next_s(self) -> float:
        """Return when the next one rings; infinity where none is left."""
        return self._heap[0][0] if self._heap else inf

    def due(self, now_s: float) -> list[Alarm]:
        """Take out what is due, earliest first."""
        ringing: list[Alarm] = []
        while self._heap and self._heap[0][0] <= now_s:
            ringing.append(heappop(self._heap)[2])
        return ringing

    def forget_ended(self, running: AbstractSet[bytes]) -> None:
        """Keep only alarms of running requests."""
        self._heap = [entry for entry in self._heap if entry[2].request_id in running]
        heapify(self._heap)
