"""The copies to one peer, by hand-off, and which of them is posted next. Pure.

Invariant: copies of one hand-off are posted, and leave when they are over, in the order they came; a copy is over only
when every slice of it that was posted has ended; of OLDEST_EVERY slices, one goes to the hand-off that has waited
longest.

The hand-off with the fewest pages left goes first: that keeps the mean time until a prompt is committed least
(shortest remaining processing time). Its deadline would say less: that is when the whole answer must be there, minutes
away, and no worker is told when the next token is due.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.kvtransfer.mover import CopyId
from pdserve.kvtransfer.session import HandoffKey, Pages

OLDEST_EVERY = 4  # slices: a long hand-off gets this part of the way, however many short ones overtake it


@dataclass(slots=True, eq=False)
class Copy:
    copy_id: CopyId
    handoff: HandoffKey
    src: Pages
    dst: Pages
    num_posted: int = 0  # pages
    num_in_flight: int = 0  # slices
    digests: tuple[int, ...] = ()
    failure: str = ""  # nothing more of it is posted
    in_doubt: bool = False  # a slice was lost

    @property
    def num_waiting(self) -> int:
        """Pages still to be posted."""
        return 0 if self.failure else len(self.src) - self.num_posted

    @property
    def over(self) -> bool:
        return self.num_in_flight == 0 and not self.num_waiting


@dataclass(slots=True, eq=False)
class _Handoff:
    copies: deque[Copy] = field(default_factory=deque)
    num_waiting: int = 0  # pages


class Copies:
    """Outstanding copies to one peer."""

    def __init__(self) -> None:
        self._handoffs: dict[HandoffKey, _Handoff] = {}  # the one that came first is the first
        self._changed: dict[HandoffKey, None] = {}  # may have copies that are over
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
        """Post nothing more of a copy, which keeps its first failure."""
        self._handoffs[copy.handoff].num_waiting -= copy.num_waiting
        copy.failure = copy.failure or reason
        self._changed[copy.handoff] = None

    def cancel(self, handoff: HandoffKey, reason: str) -> None:
        """Post nothing more of a hand-off; what was posted cannot be recalled."""
        held = self._handoffs.get(handoff)
        for copy in held.copies if held is not None else ():
            if copy.num_waiting:
                self.fail(copy, reason)

    def fail_waiting(self, reason: str) -> None:
        """Post nothing more to this peer."""
        for handoff in tuple(self._handoffs):
            self.cancel(handoff, reason)

    def take_over(self) -> Iterator[Copy]:
        """Let go of the copies that are over, as long as none of their hand-off before them is not."""
        changed, self._changed = self._changed, {}
        for key in changed:
            copies = self._handoffs[key].copies
            while copies and copies[0].over:
                yield copies.popleft()
            if not copies:
                del self._handoffs[key]
