"""Begins steps on the other pipeline stages: where it can, the next one while this stage computes the one before it.

Invariant: the other stages begin steps in the order in which this one computes them.

A step is not begun ahead if it needs a token of the one before it, or copies pages. Nor is it behind a step that may
have to be computed again: with vectors, of which one may not be finite, or in halves, once it has failed.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pdserve.base.errors import DeviceError
from pdserve.engine.step import StepPlan


class StepsAhead:
    """The steps of the last stage, which leads the others; two at most are under way.

    A stage reads a step once its part of the one before is over, for which this stage has to compute. So whoever tells
    of a step ahead may wait for the thread that computes, and is another thread.
    """

    def __init__(self, begin: Callable[[StepPlan], None]) -> None:
        """begin: lets the other stages begin a step; blocks while the socket to one of them is full."""
        self._tell = begin
        self._started: deque[StepPlan] = deque()  # the oldest first
        self._ahead: StepPlan | None = None  # the others have begun it, this stage has not
        self._is_open = False  # all have begun the oldest step, and another one may follow
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "steps-ahead")

    def start(self, plan: StepPlan) -> None:
        """Note a step that is to be computed behind those under way. Does not wait."""
        self._started.append(plan)
        self._thread.submit(self._look_ahead)

    def begin(self, plan: StepPlan) -> None:
        """Let the other stages begin the oldest step, or a part of it, unless they have."""
        with self._lock:
            ahead, self._ahead, self._is_open = self._ahead, None, False
        if ahead is None:
            self._tell(plan)
        elif ahead.chunks != plan.chunks:
            raise DeviceError("a step has failed that other pipeline stages have left behind")
        with self._lock:
            is_whole = len(plan.chunks) == len(self._started[0].chunks)
            self._is_open = is_whole and all(chunk.pooling is None for chunk in plan.chunks)
        self._thread.submit(self._look_ahead)  # not here: it may wait for what this thread computes next

    def end(self) -> None:
        """Note that the oldest step is over."""
        with self._lock:
            self._started.popleft()
            self._is_open = False

    def close(self) -> None:
        self._thread.shutdown()

    def _look_ahead(self) -> None:
        with self._lock:
            if self._is_open and self._ahead is None and len(self._started) > 1 and _is_known(self._started[1]):
                self._tell(self._started[1])
                self._ahead = self._started[1]


def _is_known(plan: StepPlan) -> bool:
    """Say whether all that others need of a step is known."""
    return not plan.copies and all(chunk.previous is None for chunk in plan.chunks)
