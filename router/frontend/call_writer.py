"""Writes replies to a gRPC call.

gRPC's `write` is a coroutine that waits until gRPC's thread has passed the reply to the transport. A task that awaited
it would run twice for each token: once to begin the write, and once only to learn that it has ended. So the coroutine
is stepped by hand, as a task would step it. A write begins at once. It ends when the next reply comes or, if another
reply already waits, as soon as its own has been passed on.

Invariant: replies go out in their order, one at a time, each once.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Self

from pdserve.net.rpc import AnyContext

_Write = Coroutine["asyncio.Future[Any]", None, None]


class CallWriter:
    """One call's replies. Leaving the `async with` block drops replies that wait."""

    def __init__(self, context: AnyContext) -> None:
        self._context = context
        self._waiting: deque[object] = deque()  # replies; bounded by the callers of `write`
        self._writing: _Write | None = None
        self._flight: asyncio.Future[Any] | None = None  # what the write waits for
        self._failed: Exception | None = None
        self._is_begun = False  # the call's initial metadata have been sent
        self._is_watched = False  # `_end_flight` will be called
        self._when_free: list[Callable[[], None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self._waiting.clear()
        self._when_free.clear()
        if self._flight is not None and not self._is_begun:
            await asyncio.wait((self._flight,))  # gRPC aborts no call while it sends the initial metadata
            with suppress(Exception):
                self._go_on()
        flight, self._flight = self._flight, None
        if flight is not None and not flight.cancel() and not flight.cancelled():
            flight.exception()  # marks it as retrieved
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.close()

    def write(self, replies: Iterable[object]) -> bool:
        """Write replies after those that wait; return whether none waits now.

        If some wait, the caller writes no more until `drain` has ended, or its function given to `when_free` is called.
        Raises what gRPC raises, perhaps for an earlier reply: then the call is over.
        """
        self._waiting.extend(replies)
        self._go_on()
        return not self._waiting

    def when_free(self, call: Callable[[], None]) -> None:
        """Call a function once, when no reply waits any more."""
        self._when_free.append(call)

    async def drain(self) -> None:
        """Return when all is written. Raises what gRPC raises."""
        while self._flight is not None:
            await asyncio.wait((self._flight,))  # awaiting the flight itself would cancel it with the waiter
            self._go_on()

    def _go_on(self) -> None:
        """End the present write if it is done, and begin the next."""
        if self._failed is not None:
            raise self._failed
        while self._flight is None or self._flight.done():
            if self._writing is None:
                if not self._waiting:
                    return
                self._writing = self._begin(self._waiting.popleft())
            try:
                self._flight = self._writing.send(None)
            except StopIteration:
                self._writing = self._flight = None
            except Exception as error:
                self._failed = error
                raise
        if not self._is_watched and (self._waiting or not self._is_begun):
            self._is_watched = True
            self._flight.add_done_callback(self._end_flight)

    def _begin(self, reply: object) -> _Write:
        return self._context.write(reply) if self._is_begun else self._write_first(reply)

    async def _write_first(self, reply: object) -> None:
        # Metadata are sent apart: after a first write that was dropped, `context.write` would send them again.
        await self._context.send_initial_metadata(())
        self._is_begun = True
        await self._context.write(reply)

    def _end_flight(self, _flight: object) -> None:
        self._is_watched = False
        with suppress(Exception):  # `write` and `drain` raise it
            self._go_on()
        if not self._waiting or self._failed is not None:
            called, self._when_free = self._when_free, []
            for call in called:
                call()
