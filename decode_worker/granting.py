"""Sets pages aside for hand-offs that are to arrive, mints the grants that offer them, and keeps the senders' leases.

Invariants: the pages of a grant are reserved for it alone. A grant leaves a free page for each running sequence, the
pages of more urgent sequences that wait, and the room that `engine.kvcache.Room` keeps. A peer's lease lapses only when
no `Alive` has come from it for `lease_s`, not counting time in which this process was frozen. That proves nothing about
the peer's writes: the pages granted to it stay quarantined. Does no I/O.
"""

from dataclasses import dataclass

from pdserve.base.ids import AttemptKey, Peer
from pdserve.decode_worker import receiver
from pdserve.engine.kvcache import NO_HIT, Hit, KvCache, Prefix, Room
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Job
from pdserve.kvtransfer.doors import Claim
from pdserve.kvtransfer.session import Grant, mint_capability
from pdserve.protocol.page_tables import PageTables
from pdserve.protocol.paging import PageOrder, Paging


@dataclass(slots=True, eq=False)
class Expected:
    """A hand-off that is to arrive."""

    key: AttemptKey
    peer: Peer
    job: Job
    order: int  # of arrival at this worker
    prefix: Prefix  # of the job's tokens
    num_tokens: int  # for which there are to be pages
    is_prefix: bool = False  # only pages of the prompt come, and no sequence goes on with them
    is_move: bool = False  # it runs where it comes from, until its last page leaves

    @property
    def num_known(self) -> int:
        """Return how many tokens the sender knows to be wanted."""
        return self.num_tokens if self.is_prefix else len(self.job.token_ids)

    def num_pages(self, paging: Paging) -> int:
        """Return how many pages it has, those that are cached here among them."""
        return PageOrder(paging, self.num_known).count(self.num_tokens)

    @property
    def num_sequences(self) -> int:
        return 0 if self.is_prefix else len(self.job.indices)

    @property
    def urgency(self) -> tuple[int, int]:
        return -self.job.priority, self.order


@dataclass(slots=True, eq=False)
class Arrival:
    """A hand-off with pages set aside, from then until they are a sequence's or free."""

    expected: Expected
    receiver: receiver.Receiver
    order: PageOrder
    reused: Hit  # held since then, unless it is quarantined
    is_quarantined: bool = False
    offered_s: float = 0.0  # when a continuation that moves could come

    @property
    def claim(self) -> Claim:
        pages = self.receiver.grant.pages
        return Claim(quarantined=pages) if self.is_quarantined else Claim(held=self.reused.pages.held, granted=pages)

    def tables(self, cache: KvCache, reused: Hit, num_tokens: int) -> PageTables:
        """Return the pages that the first `num_tokens` tokens are in: reused ones, then those that were granted."""
        start, tables = reused.num_spans * cache.page_size, reused.pages.copy()
        tables.take_unneeded(cache.paging, self.order.num_known)  # a copy: they stay held
        num_tokens = max(num_tokens, start)  # who shares a prefix may have less of it than is reused here
        count = self.order.count(num_tokens) - self.receiver.grant.first_page
        tables.add(self.order, self.receiver.grant.pages[:count], start, num_tokens)
        return tables


class Granting:
    """The grants of one process. The key of their capabilities never leaves it."""

    def __init__(self, scheduler: Scheduler, room: Room, key: bytes, lease_s: float, *, checks_digests: bool) -> None:
        self._scheduler = scheduler
        self._room = room
        self._key = key
        self._lease_s = lease_s
        self._checks_digests = checks_digests

    def reserve(self, expected: Expected, num_coming: int) -> Arrival | None:
        """Set pages aside for a hand-off, beside what runs and `num_coming` sequences; or None, and change nothing."""
        cache, scheduler, width = self._scheduler.cache, self._scheduler, expected.num_sequences
        before = [sequence for sequence in scheduler.waiting if sequence.urgency < expected.urgency]
        busy = scheduler.num_running + num_coming + sum([len(s.indices) for s in before if not s.stop_after_prompt])
        if busy and busy + width > scheduler.limits.max_num_seqs:
            return None
        num_kept = sum([scheduler.most_pages(len(s.tokens)) for s in before]) + (busy + width if busy else 0)
        if cache.pool.num_free <= num_kept:
            return None
        num_reusable = expected.num_tokens if expected.is_prefix else len(expected.job.token_ids) - 1
        order = PageOrder(cache.paging, expected.num_known)
        reused = cache.reuse(expected.prefix, num_reusable // cache.page_size, order.num_known)
        num_here, num_pinned = order.count(reused.num_spans * cache.page_size), len(reused.pages.held)
        count = order.count(expected.num_tokens) - num_here
        room = min(cache.pool.num_free - num_kept, self._room.for_grants - num_pinned)
        pages = cache.grant(count) if count <= room else None
        if pages is None:
            cache.pool.release(reused.pages.held)
            return None
        self._room.num_pinned += num_pinned
        generations = cache.pool.generations(pages)
        capability = mint_capability(self._key, expected.key, pages, generations)
        grant = Grant(num_here, pages, generations, capability, self._lease_s)
        half = receiver.Receiver(expected.key, grant, order, checks_digests=self._checks_digests)
        return Arrival(expected, half, order, reused)

    def settle(self, arrival: Arrival) -> None:
        """Note that a hand-off has been admitted, or is over."""
        self._room.num_pinned -= len(arrival.reused.pages.held)

    def quarantine(self, arrival: Arrival) -> None:
        """Set the granted pages of a hand-off apart. Nothing is written into those it reuses: others may have them."""
        self.settle(arrival)
        self._scheduler.cache.pool.release(arrival.reused.pages.held)
        self._scheduler.cache.pool.quarantine(arrival.receiver.grant.pages)
        arrival.is_quarantined, arrival.reused = True, NO_HIT


class Leases:
    """The leases of all attached peers: each `Alive` of a peer renews its lease."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._received_s: dict[Peer, float] = {}  # of peers whose lease runs
        self._lapsed: set[Peer] = set()  # attached, but silent

    def begin(self, peer: Peer, now_s: float) -> None:
        self._lapsed.discard(peer)
        self._received_s[peer] = now_s

    def renew(self, peer: Peer, now_s: float) -> bool:
        """Renew the lease of an attached peer, of which a message has arrived; return whether it had lapsed."""
        is_back = peer in self._lapsed
        if is_back or peer in self._received_s:
            self.begin(peer, now_s)
        return is_back

    def holds(self, peer: Peer) -> bool:
        """Return whether a peer may be granted pages: it is attached, and not silent."""
        return peer in self._received_s

    def end(self, peer: Peer) -> None:
        """Drop the lease of a peer whose stream, or process, has ended."""
        self._received_s.pop(peer, None)
        self._lapsed.discard(peer)

    def excuse(self, asleep_s: float, now_s: float) -> None:
        """Extend all leases by a time in which this process could receive nothing."""
        for peer, received_s in self._received_s.items():
            self._received_s[peer] = min(received_s + asleep_s, now_s)

    def take_lapsed(self, now_s: float) -> tuple[tuple[Peer, str], ...]:
        """End the leases that have lapsed; return whose they were and why. A later message renews them."""
        silent = [(peer, now_s - received_s) for peer, received_s in self._received_s.items()]
        lapsed = [(peer, silent_s) for peer, silent_s in silent if silent_s >= self.lease_s]
        for peer, _ in lapsed:
            del self._received_s[peer]
            self._lapsed.add(peer)
        return tuple((peer, f"lease of {self.lease_s:g} s lapsed: silent for {s:.1f} s") for peer, s in lapsed)
