"""Continuations on their way from one worker to another. Pure.

Invariant: a placement counts from the moment at which its worker is asked until it takes charge or is closed.
"""

from collections import Counter
from math import exp

from pdserve.errors import InvariantError
from pdserve.router.events import LinkId
from pdserve.router.request import Placement
from pdserve.router.view import PlacementKey, WorkerView

DONE = "done"
_START_S = 0.1  # that a move takes beside its bytes, before one was seen
_MEMORY = 8  # moves in the running mean
_LIFE_S = 60.0  # in which it is forgotten: moves that were slow are tried again


class Shadows:
    """The placements that are not in charge."""

    def __init__(self) -> None:
        self._placements: dict[PlacementKey, Placement] = {}
        self._leaving: Counter[LinkId] = Counter()
        self._coming: Counter[LinkId] = Counter()
        self.ended: Counter[str] = Counter()  # moves since start: "done", or what they failed of
        self._takes_s, self._noted_s = _START_S, 0.0  # mean time of a move lately, and when the last one ended
        self.sources: set[LinkId] = set()  # of moves that are over, until somebody has looked for further ones

    def __len__(self) -> int:
        return len(self._placements)

    def num_leaving(self, worker: WorkerView) -> int:
        """Return how many continuations are on their way from a worker."""
        return self._leaving[worker.link]

    def num_coming(self, worker: WorkerView) -> int:
        """Return how many continuations are on their way to a worker."""
        return self._coming[worker.link]

    def add(self, shadow: Placement) -> None:
        source, target = _ends(shadow)
        self._placements[shadow.key] = shadow
        self._leaving[source] += 1
        self._coming[target] += 1

    def remove(self, shadow: Placement) -> None:
        source, target = _ends(shadow)
        del self._placements[shadow.key]
        for counts, link in ((self._leaving, source), (self._coming, target)):
            counts[link] -= 1
            if not counts[link]:
                del counts[link]
        self.sources.add(source)

    def takes_s(self, now_s: float) -> float:
        """Return how long a move probably takes, beside its bytes."""
        return _START_S + (self._takes_s - _START_S) * exp(min(0.0, self._noted_s - now_s) / _LIFE_S)

    def note_end(self, shadow: Placement, how: str, now_s: float) -> None:
        """Note how a move ended: "done", or what it failed of. How long a failed one would have taken nobody knows."""
        self.ended[how] += 1
        elapsed_s, takes_s = max(0.0, now_s - shadow.placed_s - shadow.copy_s), self.takes_s(now_s)
        if how == DONE or elapsed_s > takes_s:
            self._takes_s, self._noted_s = takes_s + (elapsed_s - takes_s) / _MEMORY, now_s

    def check_idle(self) -> None:
        """Raise InvariantError unless nothing is on its way."""
        if self._placements or self._leaving or self._coming:
            raise InvariantError(f"these still move: {list(self._placements)}")


def _ends(shadow: Placement) -> tuple[LinkId, LinkId]:
    if shadow.source is None or shadow.decode is None:
        raise InvariantError(f"{shadow.key} is no move")
    return shadow.source.link, shadow.decode.link
