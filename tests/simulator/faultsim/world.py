"""Virtual time: one heap of what happens when, one source of chance, one trace."""

import random
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from faultsim.story import Trace
from pdserve.ids import RequestId

Action = Callable[..., object]


class ViolationError(Exception):
    """An invariant does not hold. Names what it is about, so that its story can be told."""

    def __init__(self, invariant: str, text: str, request_id: RequestId | None = None) -> None:
        super().__init__(f"{invariant}: {text}")
        self.request_id = request_id


class Owner(Protocol):
    """Who carries an action out: nobody once it is dead; later, when it is frozen."""

    alive: bool
    frozen: bool
    deferred: list[tuple[Action, tuple[object, ...]]]


class World:
    """The clock of a simulated cluster. Two actions at one time happen in the order they were asked for."""

    def __init__(self, seed: int, trace_length: int = 0) -> None:
        self.trace = Trace(trace_length)
        self.now = 0.0
        self.rng = random.Random(seed)
        self.num_events = 0
        self.num_words = 0  # things said by one process to another
        self.ended_s: dict[RequestId, float] = {}  # when a request's client had its end
        self.stop_within_s = inf  # how long after that a worker may still compute for it
        self._heap: list[tuple[float, int, Owner | None, Action, tuple[object, ...]]] = []
        self._count = 0

    def now_s(self) -> float:
        return self.now

    def after(self, delay_s: float, owner: Owner | None, action: Action, *args: object) -> None:
        """Let `owner` (None: nature) do something in a while."""
        self._count += 1
        heappush(self._heap, (self.now + delay_s, self._count, owner, action, args))

    def at(self, at_s: float, owner: Owner | None, action: Action, *args: object) -> None:
        self._count += 1
        heappush(self._heap, (at_s, self._count, owner, action, args))

    def run(self, until_s: float) -> None:
        """Let everything happen that is due by then."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now, _, owner, action, args = heappop(heap)
            self.num_events += 1
            if owner is None:
                action(*args)
            elif owner.frozen:
                owner.deferred.append((action, args))
            elif owner.alive:
                action(*args)
        self.now = until_s

    def note(self, who: str, what: object) -> None:
        """Remember something for the story of a run."""
        self.trace.note(self.now, who, what)
