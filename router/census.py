"""Which worker processes there have been, and which of them are known to have ended.

Invariant: a process known to have ended stays so while it is remembered, whatever attaches under its name; only a
later process is ever taken for another's successor.
"""

from collections import OrderedDict
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from pdserve.ids import Incarnation, WorkerId

_MAX_ENDED = 64  # processes, for workers that attach later
_MAX_NAMES = 4096


class _Seen(NamedTuple):
    incarnation: Incarnation
    heard_s: float  # last, before it left; inf while it is attached


class Census:
    """Remembers the last process of each name: of two, the one with the greater incarnation started later."""

    def __init__(self) -> None:
        self._ended: OrderedDict[tuple[WorkerId, Incarnation], None] = OrderedDict()
        self._last: OrderedDict[WorkerId, _Seen] = OrderedDict()  # unless it is known to have ended

    def ended(self) -> Iterator[tuple[WorkerId, Incarnation]]:
        """Return the processes known to have ended, first those that ended first."""
        return iter(self._ended)

    def why_not(self, worker_id: WorkerId, incarnation: Incarnation) -> str:
        """Return why a process may not attach; empty when it may."""
        if (worker_id, incarnation) in self._ended:
            return "its process is known to have ended"
        last = self._last.get(worker_id)
        if last is not None and last.incarnation > incarnation:
            later = f"incarnation {last.incarnation:016x}, its own is {incarnation:016x}"
            return f"a later process of its name has attached: {later}"
        return ""

    def note_ended(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Note an end. Who comes next under this name need not be later: its machine's clock may be behind."""
        self._ended[worker_id, incarnation] = None
        last = self._last.get(worker_id)
        if last is not None and last.incarnation == incarnation:
            del self._last[worker_id]
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def note_left(self, worker_id: WorkerId, incarnation: Incarnation, heard_s: float) -> None:
        """Note that a process is no longer attached, and when it was last heard."""
        last = self._last.get(worker_id)
        if last is not None and last.incarnation == incarnation:
            self._last[worker_id] = _Seen(incarnation, heard_s)

    def note_attached(self, worker_id: WorkerId, incarnation: Incarnation, started_s: float) -> Incarnation | None:
        """Note who has this name now, and may; return whose end that proves, if it does and none else has.

        Who was heard after the later one had started lives, or did then: whoever started that one did not wait.
        """
        before = self._last.pop(worker_id, None)
        self._last[worker_id] = _Seen(incarnation, inf)  # it is attached
        if len(self._last) > _MAX_NAMES:
            self._last.popitem(last=False)
        if before is None or before.incarnation == incarnation or before.heard_s > started_s:
            return None
        return before.incarnation
