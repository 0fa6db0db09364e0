"""The events of a response that is computed in the background, for any number of readers, now or later."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from pdserve.router.frontend.openai.dialect import KEEP_ALIVE, event
from pdserve.router.frontend.openai.reply import KEEP_ALIVE_S
from pdserve.router.frontend.responses.events import Json

EVENTS = (  # headers of a stream
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventLog:
    """Events in their order: the place of an event is its sequence number."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_over = False
        self._news = asyncio.Event()  # set with the next event; replaced then

    def add(self, events: Sequence[Json], *, is_last: bool = False) -> None:
        added = [event(told) for told in events]
        self._events += added
        self.num_bytes += sum(map(len, added))
        self._is_over = is_last
        self._news.set()
        self._news = asyncio.Event()

    async def read(self, place: int) -> AsyncIterator[bytes]:
        """Yield the events from a place on, until the last one; comments where none comes for long."""
        while True:
            if place < len(self._events):
                data, place = b"".join(self._events[place:]), len(self._events)
                yield data
                continue
            if self._is_over:
                return
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await self._news.wait()
            except TimeoutError:
                yield KEEP_ALIVE
