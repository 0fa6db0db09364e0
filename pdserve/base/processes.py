"""Which processes of workers have ended, as far as routers and receivers can know. Pure.

Invariant: a process known to have ended stays so while it is remembered, whatever attaches under its name. Of two
processes with one name, the one with the greater incarnation started later: only that one can be the successor. The
start of a successor proves that its predecessor has ended, unless the predecessor was heard after that start: then the
successor was started without waiting for the predecessor's end.
"""

import signal
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from pdserve.base.ids import Incarnation, Peer, WorkerId

MAX_NAMES = 4096  # whose last process is remembered; the names heard least recently are forgotten

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DEVICE_EXIT_STATUS = 71  # EX_OSERR: the device computes nothing any more
DRAIN_TIMED_OUT_STATUS = 75  # EX_TEMPFAIL


def exit_status(number: int) -> int:
    """Return the exit status of a process that a signal ended at once, as a shell shows it."""
    return 128 + number


def is_from_outside(status: int) -> bool:
    """Return whether a drain or a signal ended a process; when memory runs out, that is SIGKILL as well.

    `status`: as a shell shows it, or minus the signal's number, as Python does.
    """
    from_outside = {0, DRAIN_TIMED_OUT_STATUS, *map(exit_status, (*STOP_SIGNALS, signal.SIGKILL))}
    return (status if status >= 0 else exit_status(-status)) in from_outside


def name_of_life(worker_id: str, incarnation: int) -> str:
    """Return the name of one process of a worker that several machines' processes are, and that others start.

    Nobody who starts one of them knows that all former ones have ended. So no process has a successor of its name: that
    would be taken for the proof.
    """
    return f"{worker_id}.{incarnation:016x}"


class _Last(NamedTuple):
    """The last process of a name that has attached."""

    incarnation: Incarnation
    heard_s: float


class KnownProcesses:
    """Remembers the last process of each name, and the processes that have ended."""

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        self._ended: OrderedDict[Peer, None] = OrderedDict()
        self._last: OrderedDict[WorkerId, _Last] = OrderedDict()  # without processes known to have ended

    def ended(self) -> Iterator[Peer]:
        """Return the processes known to have ended, in the order of their ends."""
        return iter(self._ended)

    def refusal(self, process: Peer) -> str:
        """Return why a process may not attach, empty if it may."""
        worker_id, incarnation = process
        if process in self._ended:
            return "its process is known to have ended"
        last = self._last.get(worker_id)
        if last is not None and last.incarnation > incarnation:
            later = f"incarnation {last.incarnation:016x}, its own is {incarnation:016x}"
            return f"a later process of its name has attached: {later}"
        return ""

    def note_ended(self, process: Peer) -> None:
        """Note an end. The next process of this name may have a smaller incarnation, from a clock that is behind."""
        self._ended[process] = None
        last = self._last.get(process[0])
        if last is not None and last.incarnation == process[1]:
            del self._last[process[0]]
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def note_heard(self, process: Peer, heard_s: float) -> None:
        """Note when a process was last heard, unless it has ended or has a successor."""
        worker_id, incarnation = process
        last = self._last.get(worker_id)
        if process in self._ended or (last is not None and last.incarnation != incarnation):
            return
        self._last[worker_id] = _Last(incarnation, heard_s)
        self._last.move_to_end(worker_id)
        if len(self._last) > MAX_NAMES:
            self._last.popitem(last=False)

    def note_attached(self, process: Peer, started_s: float, now_s: float) -> Peer | None:
        """Note which process has this name now; return its predecessor if this is the first proof that it has ended.

        Call `note_heard` before this for a predecessor that is still attached.
        """
        worker_id, incarnation = process
        before = self._last.pop(worker_id, None)
        self.note_heard(process, now_s)
        if before is None or before.incarnation == incarnation or before.heard_s > started_s:
            return None
        return Peer(worker_id, before.incarnation)
