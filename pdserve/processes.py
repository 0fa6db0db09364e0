"""Which processes of workers have ended, as far as routers and receivers can know. Pure.

Invariant: a process known to have ended stays so while it is remembered, whatever attaches under its name. Of two
processes with one name, the one with the greater incarnation started later: only that one can be the successor. The
start of a successor proves that its predecessor has ended, unless the predecessor was heard after that start: then the
successor was started without waiting for the predecessor's end.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from pdserve.ids import Incarnation, WorkerId

MAX_NAMES = 4096  # whose last process is remembered; the names heard least recently are forgotten

Process = tuple[WorkerId, Incarnation]


class _Last(NamedTuple):
    """The last process of a name that has attached."""

    incarnation: Incarnation
    heard_s: float


class KnownProcesses:
    """Remembers the last process of each name, and the processes that have ended."""

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        self._ended: OrderedDict[Process, None] = OrderedDict()
        self._last: OrderedDict[WorkerId, _Last] = OrderedDict()  # without processes known to have ended

    def ended(self) -> Iterator[Process]:
        """Return the processes known to have ended, in the order of their ends."""
        return iter(self._ended)

    def refusal(self, process: Process) -> str:
        """Return why a process may not attach, empty if it may."""
        worker_id, incarnation = process
        if process in self._ended:
            return "its process is known to have ended"
        last = self._last.get(worker_id)
        if last is not None and last.incarnation > incarnation:
            later = f"incarnation {last.incarnation:016x}, its own is {incarnation:016x}"
            return f"a later process of its name has attached: {later}"
        return ""

    def note_ended(self, process: Process) -> None:
        """Note an end. The next process of this name may have a smaller incarnation, from a clock that is behind."""
        self._ended[process] = None
        last = self._last.get(process[0])
        if last is not None and last.incarnation == process[1]:
            del self._last[process[0]]
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def note_heard(self, process: Process, heard_s: float) -> None:
        """Note when a process was last heard, unless it has ended or has a successor."""
        worker_id, incarnation = process
        last = self._last.get(worker_id)
        if process in self._ended or (last is not None and last.incarnation != incarnation):
            return
        self._last[worker_id] = _Last(incarnation, heard_s)
        self._last.move_to_end(worker_id)
        if len(self._last) > MAX_NAMES:
            self._last.popitem(last=False)

    def note_attached(self, process: Process, started_s: float, now_s: float) -> Process | None:
        """Note which process has this name now; return its predecessor if this is the first proof that it has ended.

        Call `note_heard` before this for a predecessor that is still attached.
        """
        worker_id, incarnation = process
        before = self._last.pop(worker_id, None)
        self.note_heard(process, now_s)
        if before is None or before.incarnation == incarnation or before.heard_s > started_s:
            return None
        return worker_id, before.incarnation
