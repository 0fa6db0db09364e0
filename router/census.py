"""Which worker processes there have been, and which of them are known to have ended.

Invariant: a process known to have ended stays so while it is remembered, whatever attaches under its name.
"""

from collections import OrderedDict
from collections.abc import Iterator

from pdserve.ids import Incarnation, WorkerId

_MAX_ENDED = 64  # processes, for workers that attach later
_MAX_NAMES = 4096


class Census:
    """Remembers the last process of each name. A name's next process is proof that the one before has ended."""

    def __init__(self) -> None:
        self._ended: OrderedDict[tuple[WorkerId, Incarnation], None] = OrderedDict()
        self._last: OrderedDict[WorkerId, Incarnation] = OrderedDict()

    def ended(self) -> Iterator[tuple[WorkerId, Incarnation]]:
        """Return the processes known to have ended, first those that ended first."""
        return iter(self._ended)

    def has_ended(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        return (worker_id, incarnation) in self._ended

    def note_ended(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self._ended[worker_id, incarnation] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def note_attached(self, worker_id: WorkerId, incarnation: Incarnation) -> Incarnation | None:
        """Note who has this name now; return whom it follows, unless that one's end is known already."""
        before = self._last.pop(worker_id, None)
        self._last[worker_id] = incarnation
        if len(self._last) > _MAX_NAMES:
            self._last.popitem(last=False)
        if before is None or before == incarnation or self.has_ended(worker_id, before):
            return None
        return before
