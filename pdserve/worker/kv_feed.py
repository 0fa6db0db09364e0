"""Tells whoever wants to know what a worker's prefix cache holds: routers on their links, others over ZMQ.

A router that attaches hears first of all that is cached, then of what changes. Its messages are put together when the
link has nothing else to send, one bounded part at a time, so a router that reads slowly costs no memory and delays
nothing.
"""

import time
from functools import partial

from pdserve import kvevents
from pdserve.engine.journal import Journal
from pdserve.engine.kvcache import KvCache
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker.cached_pages import CachedPages, Listener
from pdserve.worker.kv_publisher import KvPublisher
from pdserve.worker.link import Links
from pdserve.worker.messages import RouterRef


class KvFeed:
    """Empties the cache's journal after each step."""

    def __init__(self, cache: KvCache, pages: CachedPages, links: Links, publisher: KvPublisher | None) -> None:
        self._journal = cache.journal = Journal()
        self._pages = pages
        self._links = links
        self._publisher = publisher
        self._published = None if publisher is None else pages.listen()
        self._listeners: dict[RouterRef, Listener] = {}
        self._queued: set[RouterRef] = set()  # in whose queue a message is that has yet to be put together

    def flush(self) -> None:
        """Tell what changed since the last time, and routers that have attached since what is cached. Never blocks."""
        changes, routers = self._journal.take(), self._links.wanting_kv_events
        if not changes and routers == tuple(self._listeners):
            return
        self._pages.apply(changes)
        self._publish()
        for router in [router for router in self._listeners if router not in routers]:
            self._pages.leave(self._listeners.pop(router))
            self._queued.discard(router)
        for router in routers:
            if router not in self._listeners:
                self._listeners[router] = self._pages.listen()
            self._offer(router)

    def _publish(self) -> None:
        while self._publisher is not None and self._published is not None and self._pages.has_news(self._published):
            events = self._pages.next_events(self._published)
            if events:
                self._publisher.publish(kvevents.encode(events, time.time()))

    def _offer(self, router: RouterRef) -> None:
        """Have a message sent to a router, if there is news for it."""
        if router not in self._queued and self._pages.has_news(self._listeners[router]):
            self._queued.add(router)
            self._links.send(router, partial(self._next_message, router))

    def _next_message(self, router: RouterRef) -> link.AttachRequest | None:
        listener = self._listeners.get(router)
        if listener is None:
            return None
        self._queued.discard(router)
        events = self._pages.next_events(listener)
        self._offer(router)
        if not events:
            return None
        return link.AttachRequest(kv_events=link.KvEvents(batch=kvevents.encode(events, time.time())))
