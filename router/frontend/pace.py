"""When answers are written: together what came in one turn of the event loop, and less often where steps are short.

Adaptive, an answer's first token is written at once. A later one waits while the answer was written less than WINDOW_S
ago, and at most for LATEST_S: with steps over WINDOW_S each token is written at once, with shorter ones several go
together.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.router.frontend.answer import Answer

WINDOW_S = 0.016  # between two writes of an answer: sixty a second, as many as a screen shows
LATEST_S = 0.02  # that a token waits at most, where the one that it waits for does not come


class Pace:
    """Writes answers at their time."""

    def __init__(
        self, interval: int | None, loop: asyncio.AbstractEventLoop, fail: Callable[[Exception], None]
    ) -> None:
        """`interval`: tokens of an answer that are written together; None: as many as come within WINDOW_S.

        `fail` receives what a write raises. Doors do not raise: it is a bug, and stops the process.
        """
        self._interval = interval
        self._fail = fail
        self._loop = loop
        self._due: dict[Answer, None] = {}  # to be written in this turn
        self._held: deque[tuple[float, Answer, int]] = deque()  # latest time, answer, its writes when it was held
        self._alarm: asyncio.TimerHandle | None = None

    def add(self, answer: "Answer", *, is_urgent: bool) -> None:
        """Let an answer that has gained something be written at its time; in this turn if it is urgent."""
        if answer in self._due:
            return
        if is_urgent or not answer.num_written or self._is_due(answer):
            if not self._due:
                self._loop.call_soon(self._write)
            self._due[answer] = None

    def _is_due(self, answer: "Answer") -> bool:
        if self._interval is not None:
            return answer.num_unsent >= self._interval
        now_s = self._loop.time()
        if now_s - answer.written_s >= WINDOW_S:
            return True
        if answer.held_since != answer.num_writes:
            answer.held_since = answer.num_writes
            self._held.append((now_s + LATEST_S, answer, answer.num_writes))
            if self._alarm is None:
                self._alarm = self._loop.call_later(LATEST_S, self._write_held)
        return False

    def _write(self) -> None:
        due, self._due = self._due, {}
        now_s = self._loop.time()
        try:
            for answer in due:
                answer.written_s = now_s
                answer.write()
        except Exception as error:
            self._fail(error)
            raise

    def _write_held(self) -> None:
        """Write what has waited long enough, and is not written yet; look again when the next one has."""
        now_s = self._loop.time()
        while self._held and self._held[0][0] <= now_s:
            _, answer, num_writes = self._held.popleft()
            if answer.num_writes == num_writes:
                self.add(answer, is_urgent=True)
        self._alarm = self._loop.call_at(self._held[0][0], self._write_held) if self._held else None
