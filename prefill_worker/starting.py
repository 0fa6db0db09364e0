"""When prompts begin to be computed. Decides; does no I/O.

Invariant: prompts that hold pages here before they are granted any leave enough for the longest prompt.

A receiver may have set pages aside for a prompt that is still to be computed here. If prompts that wait for its
grants held all pages, each would wait for the other for ever.
"""

from dataclasses import dataclass

from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer.session import HandoffKey


@dataclass(slots=True, eq=False)
class _Waiting:
    key: HandoffKey
    sequence: Sequence
    is_granted: bool


class Starting:
    """Prompts that the scheduler does not have yet, the most urgent first."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: list[_Waiting] = []
        self._pages_ahead: dict[HandoffKey, int] = {}  # of prompts that have started, and are not granted any yet
        self._may_start = False  # whether one of them may have room that had none when this was last tried

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return sum(len(each.sequence.tokens) for each in self._waiting)

    def add(self, key: HandoffKey, sequence: Sequence, *, is_granted: bool) -> None:
        """Let a prompt start when it may. `is_granted`: it has pages where it goes, or goes nowhere."""
        self._waiting.append(_Waiting(key, sequence, is_granted))
        self._waiting.sort(key=lambda each: each.sequence.urgency)
        self._may_start = True

    def granted(self, key: HandoffKey) -> None:
        """Note that pages are set aside where a prompt goes."""
        for each in self._waiting:
            if each.key == key:
                each.is_granted = True
        self._settle(key)

    def remove(self, key: HandoffKey) -> None:
        """Note that a prompt holds no pages any more, and wants none."""
        self._waiting = [each for each in self._waiting if each.key != key]
        self._settle(key)

    def start(self) -> None:
        """Give prompts to the scheduler: granted ones, and others only as far as the rest leaves them room."""
        if not self._may_start:
            return
        cache, limits = self._scheduler.cache, self._scheduler.limits
        room = cache.pool.num_pages - cache.num_pages(limits.max_model_len) - sum(self._pages_ahead.values())
        waiting: list[_Waiting] = []
        for each in self._waiting:
            num_pages = 0 if each.is_granted else cache.num_pages(len(each.sequence.tokens))
            if not each.is_granted and num_pages > room:
                waiting.append(each)
                room = 0  # the next ones do not overtake it
                continue
            if num_pages:
                self._pages_ahead[each.key] = num_pages
                room -= num_pages
            self._scheduler.add(each.sequence)
        self._waiting, self._may_start = waiting, False

    def _settle(self, key: HandoffKey) -> None:
        self._pages_ahead.pop(key, None)
        self._may_start = True
