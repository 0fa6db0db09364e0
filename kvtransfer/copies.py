"""The queue of copies to one peer: which of them is posted next, and which are finished. Pure.

Invariant: copies of one hand-off are posted, and leave the queue, in the order in which they came. A copy is finished
only when every slice of it that was posted has ended. Of OLDEST_EVERY slices, one goes to the oldest hand-off.

The hand-off with the fewest pages left goes first: shortest remaining processing time keeps the mean time until a
prompt is committed least. Its deadline would be a worse guide: the deadline is when the whole answer must be complete,
minutes away, and no worker knows when the next token is due.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.protocol.page_tables import Pages

OLDEST_EVERY = 4  # slices: a long hand-off gets this share of the bandwidth, however many short ones overtake it


OnStopped = Callable[[ReceiverMessage], None]  # with a CopyStopped


@dataclass(slots=True, eq=False)
class Copy:
    """Pages of one hand-off to write into a peer's. It is posted slice by slice."""

    peer: Peer
    handoff: AttemptKey
    src: Pages
    dst: Pages
    num_posted: int = 0  # pages
    num_in_flight: int = 0  # slices
    digests: tuple[int, ...] = ()  # of the posted pages
    failure: str = ""  # if not empty, nothing more of it is posted
    in_doubt: bool = False  # a posted slice was lost

    @property
    def num_waiting(self) -> int:
        """Return how many pages are still to be posted."""
        return 0 if self.failure else len(self.src) - self.num_posted

    @property
    def is_finished(self) -> bool:
        return self.num_in_flight == 0 and not self.num_waiting

    def report(self) -> ReceiverMessage:
        stopped = CopyStopped(None if self.failure else self.digests, self.failure, self.in_doubt)
        return ReceiverMessage(self.peer, self.handoff, stopped)


@dataclass(slots=True, eq=False)
class _Handoff:
    copies: deque[Copy] = field(default_factory=deque)
    num_waiting: int = 0  # pages


class CopyQueue:
    """Outstanding copies to one peer."""

    def __init__(self) -> None:
        self._handoffs: dict[AttemptKey, _Handoff] = {}  # oldest first
        self._changed: dict[AttemptKey, None] = {}  # may have finished copies
        self._num_turns = 0

    def __iter__(self) -> Iterator[Copy]:
        for handoff in self._handoffs.values():
            yield from handoff.copies

    def __len__(self) -> int:
        return sum(len(handoff.copies) for handoff in self._handoffs.values())

    def __bool__(self) -> bool:
        return bool(self._handoffs)

    def add(self, copy: Copy) -> None:
        handoff = self._handoffs.setdefault(copy.handoff, _Handoff())
        handoff.copies.append(copy)
        handoff.num_waiting += copy.num_waiting
        self._changed[copy.handoff] = None

    def next(self) -> Copy | None:
        """Return the copy whose next slice is to be posted."""
        waiting = [handoff for handoff in self._handoffs.values() if handoff.num_waiting]
        if not waiting:
            return None
        self._num_turns += 1
        is_oldests = self._num_turns % OLDEST_EVERY == 0
        handoff = waiting[0] if is_oldests else min(waiting, key=lambda h: h.num_waiting)
        return next(copy for copy in handoff.copies if copy.num_waiting)

    def posted(self, copy: Copy, num_pages: int, *, has_landed: bool) -> None:
        """Note that pages of a copy were posted, and may have landed at once."""
        copy.num_posted += num_pages
        copy.num_in_flight += not has_landed
        self._handoffs[copy.handoff].num_waiting -= num_pages
        self._changed[copy.handoff] = None

    def slice_ended(self, copy: Copy) -> None:
        copy.num_in_flight -= 1
        self._changed[copy.handoff] = None

    def fail(self, copy: Copy, reason: str) -> None:
        """Post nothing more of a copy. A copy keeps its first failure."""
        self._handoffs[copy.handoff].num_waiting -= copy.num_waiting
        copy.failure = copy.failure or reason
        self._changed[copy.handoff] = None

    def cancel(self, handoff: AttemptKey, reason: str) -> None:
        """Post nothing more of a hand-off; what was posted cannot be recalled."""
        held = self._handoffs.get(handoff)
        for copy in held.copies if held is not None else ():
            if copy.num_waiting:
                self.fail(copy, reason)

    def cancel_all(self, reason: str) -> None:
        for handoff in self._handoffs:
            self.cancel(handoff, reason)

    def pop_finished(self) -> Iterator[Copy]:
        """Remove and yield finished copies, each once all earlier ones of its hand-off are finished."""
        changed, self._changed = self._changed, {}
        for key in changed:
            copies = self._handoffs[key].copies
            while copies and copies[0].is_finished:
                yield copies.popleft()
            if not copies:
                del self._handoffs[key]
