"""One answer, read by the task of the gRPC call that it is for."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pdserve.router.commands import Finished, Refused
from pdserve.router.frontend.answer import Answer, Gain

Outcome = Finished | Refused
Take = Callable[[Sequence[Gain], Outcome | None], Awaitable[None] | None]  # None: nothing to wait for


class Reading:
    """Gives an answer's gains to its call one after another. A `Client` of answers; made by the task that runs it."""

    def __init__(self) -> None:
        self._gains: Sequence[Gain] = ()
        self._outcome: Outcome | None = None
        self._has_news = False
        self._waits: asyncio.Future[None] | None = None  # for news; an Event costs more
        self._task = asyncio.current_task()
        self.was_cut_off = False  # its reader is too slow

    def write(self, answer: Answer, gains: Sequence[Gain], outcome: Outcome | None) -> bool:
        del answer
        self._gains, self._outcome, self._has_news = gains, outcome, True
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)
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
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._has_news:
                    self._waits = loop.create_future()
                    await self._waits
                self._has_news = False
                outcome = self._outcome
                taking = take(self._gains, outcome)
                if taking is not None:
                    await taking
                if outcome is not None:
                    return outcome
                answer.resume()
        except asyncio.CancelledError:
            if self._task is None or self._outcome is None or not self.was_cut_off or self._task.uncancel():
                raise  # the client has gone, or the server stops
            return self._outcome
