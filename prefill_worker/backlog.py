"""Prompts that wait until they are granted, or leave room for those that are. Decides; does no I/O.

Invariant: prompts that hold pages here before they are granted any leave enough for the longest prompt.

A decode worker may have set pages aside for a prompt that is still to be computed here. If prompts that wait for its
grants held all pages, each would wait for the other for ever.
"""

from pdserve.engine.scheduler import Scheduler
from pdserve.prefill_worker.tasks import Task


class Backlog:
    """Tasks that the scheduler does not have yet, the most urgent first."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: list[Task] = []
        self._pages_ahead = 0  # of all tasks
        self._may_start = False  # whether one of them may have room that had none when this was last tried

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return sum(len(task.sequence.tokens) for task in self._waiting)

    def add(self, task: Task) -> None:
        self._waiting.append(task)
        self._waiting.sort(key=lambda t: t.sequence.urgency)
        self._may_start = True

    def settle(self, task: Task) -> None:
        """Count a task no longer among those that hold pages before they are granted any, or wait for that."""
        self._pages_ahead -= task.pages_ahead
        task.pages_ahead = 0
        self._may_start = True

    def remove(self, task: Task) -> None:
        """Note that a task is over."""
        if not task.has_started:
            self._waiting.remove(task)
        self.settle(task)

    def start(self) -> None:
        """Give prompts to the scheduler: those with room on their decode worker, and others only ahead of that."""
        if not self._may_start:
            return
        cache, limits = self._scheduler.cache, self._scheduler.limits
        room = cache.pool.num_pages - cache.num_pages(limits.max_model_len) - self._pages_ahead
        waiting: list[Task] = []
        for task in self._waiting:
            ahead = 0
            if not task.is_granted and (room <= 0 or (ahead := cache.num_pages(len(task.sequence.tokens))) > room):
                waiting.append(task)
                room = 0  # the next ones do not overtake it
                continue
            room -= ahead
            task.has_started, task.pages_ahead = True, ahead
            self._pages_ahead += ahead
            self._scheduler.add(task.sequence)
        self._waiting, self._may_start = waiting, False
