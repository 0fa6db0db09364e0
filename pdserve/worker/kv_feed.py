"""Reports what a worker's prefix cache holds: to routers on their links, and to others over ZMQ.

Invariant: a router's `unsent` pages are those on which the cache and what the router was sent differ. So a router that
attaches is sent all that is cached, then what changes, and no page twice. A message is put together when the link has
nothing else to send, so a router that reads slowly delays nothing, and costs no more memory than its pages' hashes.
"""

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from pdserve.engine.kvcache import KvCache
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import Tier
from pdserve.protocol.link import TIER_NUMBERS
from pdserve.protocol.prefix_hash import PrefixHash
from pdserve.worker.link import Links
from pdserve.worker.messages import RouterRef

if TYPE_CHECKING:
    from pdserve.worker.kv_publisher import KvPublisher  # needs ZMQ, which workers alone have

MAX_PAGES = 65_536  # in one message: 1 MiB of hashes, put together in a few ms


class KvFeed:
    """Takes the cache's changes whenever steps are reported."""

    def __init__(
        self,
        cache: KvCache,
        links: Links,
        publisher: "KvPublisher | None" = None,
        max_pages: int = MAX_PAGES,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """`cache`: what a tier holds. Each tier has a feed of its own."""
        self._cache = cache
        self._cache.take_changes()
        self._links = links
        self._publisher = publisher
        self._max_pages = max_pages
        self._tier = TIER_NUMBERS[tier]
        self._unsent: dict[RouterRef, dict[PrefixHash, None]] = {}
        self._queued: set[RouterRef] = set()  # routers with a message that is put together in its turn

    def flush(self) -> None:
        """Report what changed since the last time, and what is cached to routers attached since. Never blocks."""
        self._take_changes()
        routers = self._links.wanting_kv_events
        for router in [router for router in self._unsent if router not in routers]:
            del self._unsent[router]
            self._queued.discard(router)
        for router in routers:
            if router not in self._unsent:
                self._unsent[router] = dict.fromkeys(self._cache.spans)
            self._offer(router)

    def _take_changes(self) -> None:
        changes = self._cache.take_changes()
        if changes and self._publisher is not None:
            self._publisher.publish(changes)
        for unsent in self._unsent.values():
            for change in [change for change in changes if not change.group]:
                for page in change.hashes:
                    if page in unsent:
                        del unsent[page]
                    else:
                        unsent[page] = None

    def _offer(self, router: RouterRef) -> None:
        """Have a message sent to a router, if there is something to report."""
        if router not in self._queued and self._unsent[router]:
            self._queued.add(router)
            self._links.send(router, partial(self._next_message, router))

    def _next_message(self, router: RouterRef) -> link.AttachRequest | None:
        self._take_changes()
        unsent = self._unsent.get(router)
        if unsent is None:
            return None
        self._queued.discard(router)
        pages, cached = list(islice(unsent, self._max_pages)), self._cache.spans
        for page in pages:
            del unsent[page]
        self._offer(router)
        if not pages:
            return None
        stored = b"".join([page for page in pages if page in cached])
        removed = b"".join([page for page in pages if page not in cached])
        return link.AttachRequest(kv_events=link.KvEvents(stored=stored, removed=removed, tier=self._tier))
