"""Tells whoever wants to know what changed in a worker's prefix cache: routers on their links, others over ZMQ."""

import time

from pdserve import kvevents
from pdserve.engine.journal import CacheEvent, Journal, PagesRemoved, PagesStored
from pdserve.engine.kvcache import KvCache
from pdserve.engine.prefix import PageName
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker.kv_publisher import KvPublisher
from pdserve.worker.link import Links

HASH_BYTES = 8  # subscribers know hashes of 64 bits


class KvFeed:
    """Empties the cache's journal after each step. Nobody hears of what was stored before he listened."""

    def __init__(self, cache: KvCache, links: Links, publisher: KvPublisher | None) -> None:
        self._journal = cache.journal = Journal()
        self._links = links
        self._publisher = publisher

    def flush(self) -> None:
        """Tell what changed since the last time. Never blocks."""
        changes = self._journal.take()
        routers = self._links.wanting_kv_events
        if not changes or not (routers or self._publisher):
            return
        batch = kvevents.encode([told(change) for change in changes], time.time())
        if self._publisher is not None:
            self._publisher.publish(batch)
        for router in routers:
            self._links.send(router, link.AttachRequest(kv_events=link.KvEvents(batch=batch)))


def told(change: CacheEvent) -> kvevents.KvEvent:
    """Return a change in vLLM's words."""
    match change:
        case PagesRemoved(names):
            return kvevents.BlockRemoved([_hash(name) for name in names], kvevents.MEDIUM)
        case PagesStored(parent, names, token_ids, page_size, salt):
            return kvevents.BlockStored(
                [_hash(name) for name in names],
                None if parent is None else _hash(parent),
                list(token_ids),
                page_size,
                medium=kvevents.MEDIUM,
                extra_keys=[(salt,), *[None] * (len(names) - 1)] if salt and parent is None else None,
            )


def _hash(name: PageName) -> int:
    return int.from_bytes(name[:HASH_BYTES], "big")
