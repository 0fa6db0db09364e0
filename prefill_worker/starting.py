"""When prompts begin to be computed. Decides; does no I/O.

Invariant: prompts that are computed before their receiver has granted them pages leave free the room that
`engine.kvcache.Room` keeps.

Two workers may wait for each other: prompts here hold all pages and wait for a grant, while the receiver keeps its
pages for prompts that are still to be computed here. The room that is left lets the latter be computed.
"""

from pdserve.base.ids import AttemptKey
from pdserve.engine.kvcache import Room
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence


class Starting:
    """Prompts that the scheduler does not have yet, the most urgent first."""

    def __init__(self, scheduler: Scheduler, room: Room) -> None:
        self._scheduler = scheduler
        self._room = room
        self._waiting: list[Sequence] = []
        self._ungranted: set[AttemptKey] = set()  # prompts whose target has granted no pages yet
        self._may_start = False  # whether one of them has come, gone or been granted pages since this was last tried
        self._tried = 0  # the room that was left when this was last tried

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self._waiting)

    def add(self, sequence: Sequence, *, leaves: bool) -> None:
        """Let a prompt start when it may. `leaves`: it goes to another worker, which has granted no pages yet."""
        if leaves:
            self._room.ahead[sequence.job.key] = 0
            self._ungranted.add(AttemptKey(*sequence.job.key))
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda each: each.urgency)
        self._may_start = True

    def granted(self, key: AttemptKey) -> None:
        """Note that pages are set aside where a prompt goes."""
        self._ungranted.discard(key)
        if key in self._room.ahead:
            self._room.ahead[key] = 0
        self._may_start = True

    def remove(self, key: AttemptKey) -> None:
        """Note that a prompt holds no pages any more, and wants none."""
        self._waiting = [each for each in self._waiting if each.job.key != key]
        self._ungranted.discard(key)
        self._room.ahead.pop(key, None)
        self._may_start = True

    def start(self, num_kept: int) -> None:
        """Give prompts to the scheduler: granted ones, and others as far as they leave room and `num_kept` pages."""
        room = self._room.left - num_kept
        if not self._may_start and room <= self._tried:
            return
        waiting: list[Sequence] = []
        for sequence in self._waiting:
            if sequence.job.key in self._ungranted:
                num_pages = self._scheduler.most_pages(len(sequence.tokens))
                if num_pages > room:
                    waiting.append(sequence)
                    room = 0  # the next ones do not overtake it
                    continue
                self._room.ahead[sequence.job.key] = num_pages
                room -= num_pages
            self._scheduler.add(sequence)
        self._waiting, self._may_start = waiting, False
        self._tried = self._room.left - num_kept
