"""One answer, read by the task of the call that it is for."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pdserve.router.commands import Finished, Refused
from pdserve.router.frontend.answer import Answer, Gain

Outcome = Finished | Refused
Take = Callable[[Sequence[Gain], Outcome | None], Awaitable[None]]


class Reading:
    """Gives an answer's gains to its call one after another. A `Client` of answers; made by the task that runs it."""

    def __init__(self) -> None:
        self._gains: Sequence[Gain] = ()
        self._outcome: Outcome | None = None
        self._news = asyncio.Event()
        self._task = asyncio.current_task()
        self.was_cut_off = False  # its reader is too slow

    def write(self, answer: Answer, gains: Sequence[Gain], outcome: Outcome | None) -> bool:
        del answer
        self._gains, self._outcome = gains, outcome
        self._news.set()
        return False

    def cut_off(self, answer: Answer, outcome: Refused) -> None:
        del answer
        self._outcome, self.was_cut_off = outcome, True
        if self._task is not None:
            self._task.cancel()

    async def run(self, answer: Answer, take: Take) -> Outcome:
        """Let `take` have all gains, the last with the outcome; return how the answer ended.

        An answer that is cut off ends in the middle of what `take` does.
        """
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                outcome = self._outcome
                await take(self._gains, outcome)
                if outcome is not None:
                    return outcome
                answer.resume()
        except asyncio.CancelledError:
            if self._task is None or self._outcome is None or not self.was_cut_off or self._task.uncancel():
                raise  # the client has gone, or the server stops
            return self._outcome
