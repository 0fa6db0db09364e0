"""Events on their way to a worker's core."""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import replace
from math import inf

from pdserve.grammar.matching import Grammars
from pdserve.kvtransfer.doors import PeerGone
from pdserve.kvtransfer.ranked_mover import AnyMover
from pdserve.worker.messages import Event, Placed

MAX_INBOX = 16384  # events; beyond it, streams are read no further


class Inbox:
    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, event: Event) -> None:
        """Add an event whose number is bounded elsewhere, such as an answer to a command."""
        self._events.append(event)
        self._has_news.set()
        if len(self._events) >= MAX_INBOX:
            self._has_room.clear()

    async def offer(self, event: Event) -> None:
        """Add an event from the network, once there is room."""
        await self._has_room.wait()
        self.put(event)

    def drain(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        self._has_news.clear()
        self._has_room.set()
        return events

    async def wait(self, timeout_s: float = inf) -> None:
        """Return when there is an event, when woken, or after a time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None if timeout_s == inf else timeout_s):
                await self._has_news.wait()

    def wake(self) -> None:
        """Have `wait` return, though there may be no event."""
        self._has_news.set()


class Listener:
    """Forwards events to the inbox in order. PeerGone waits until no write of that process can reach our pages.

    A frozen writer may delay PeerGone; no other event waits for it.
    """

    def __init__(self, inbox: Inbox, tasks: asyncio.TaskGroup) -> None:
        self._inbox = inbox
        self._tasks = tasks
        self._settling: set[asyncio.Task[None]] = set()
        self._mover: AnyMover | None = None
        self._grammars: Grammars | None = None
        self._is_closed = False

    def guard(self, mover: AnyMover) -> None:
        """Wait for what this mover may still write. Nobody may be granted a page before this."""
        self._mover = mover

    def open_grammars(self, grammars: Grammars) -> None:
        """Give jobs placed here their matchers, of these."""
        self._grammars = grammars

    def put(self, event: Event) -> None:
        """Take an event whose number is bounded elsewhere."""
        if isinstance(event, PeerGone):
            if self._is_closed:
                return
            settling = self._tasks.create_task(self._settle(event), name=f"end of {event.peer.worker_id}")
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)
        else:
            self._inbox.put(event)

    async def offer(self, event: Event) -> None:
        """Take an event from the network; waits while the core has too much to do."""
        if isinstance(event, PeerGone):
            self.put(event)
            return
        if isinstance(event, Placed) and event.job.params.structured_output is not None and self._grammars is not None:
            new_matcher = self._grammars.compile(event.job.params.structured_output)
            event = replace(event, job=replace(event.job, new_matcher=new_matcher))
        await self._inbox.offer(event)

    def close(self) -> None:
        """Report no end of a process from here on, whether it is known already or not."""
        self._is_closed = True
        for settling in self._settling:
            settling.cancel()

    async def _settle(self, gone: PeerGone) -> None:
        if self._mover is not None:
            await self._mover.settle(gone.peer)
        await self._inbox.offer(gone)
