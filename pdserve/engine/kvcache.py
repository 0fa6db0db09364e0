"""A worker's KV pages, the prefixes found in them, and how many of them may wait for other workers. Pure.

Invariant: an indexed page still holds the KV that its hash says; it leaves the index the moment it is given out.

Full pages are found by content, span by span: a span is as many tokens as the largest page holds. In each group, the
hash of a span names the pages that it fills. A sequence's spans are hashed only as far as somebody looks for them, so a
long prompt that is not cached does not hold up a worker's loop.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pdserve.base.errors import ConfigError, InvariantError
from pdserve.base.ids import Attempt, PageId, RequestId
from pdserve.base.values import value
from pdserve.engine.pages import PagePool
from pdserve.protocol.kvlayout import Tier
from pdserve.protocol.page_tables import Pages, PageTables
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import CacheScope, PrefixHash, PrefixHasher

_HASHED_AT_ONCE = 32  # spans


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens from position 0 on, within a scope, and the hashes of their full spans as far as they are known."""

    token_ids: Sequence[int]  # may grow
    scope: CacheScope
    hashes: list[PrefixHash] = field(default_factory=list)


@value
class Hit:
    """A cached prefix of so many spans: the pages that later queries need, each held once more."""

    num_spans: int
    pages: PageTables


NO_HIT = Hit(0, PageTables())


@value
class PagesStored:
    """The pages of the spans in `run` can be reused from now on. The sequence's earlier ones were stored before."""

    prefix: Prefix
    run: range
    group: int = 0
    tier: Tier = Tier.DEVICE

    @property
    def hashes(self) -> Sequence[PrefixHash]:
        return self.prefix.hashes[self.run.start : self.run.stop]


@value
class PagesRemoved:
    """Pages of these spans are about to be overwritten."""

    hashes: Sequence[PrefixHash]
    group: int = 0
    tier: Tier = Tier.DEVICE


CacheChange = PagesStored | PagesRemoved


class KvCache:
    """One worker's pages. This class alone gives out pages: nobody else calls the pool's `take` and `grant`."""

    def __init__(self, num_pages: int, paging: Paging, hasher: PrefixHasher | None) -> None:
        """Without `hasher`, nothing is reused. ConfigError if blocks of tokens do not fill spans."""
        if hasher is not None and paging.span % hasher.block_tokens:
            raise ConfigError(f"page_size: {paging.span} is no multiple of {hasher.block_tokens}")
        self.paging = paging
        self.page_size = paging.span  # of the largest pages
        self.pool = PagePool(num_pages)
        self._hasher = hasher
        self._index: tuple[dict[PrefixHash, Pages], ...] = tuple([{} for _ in paging.shapes])
        self._span_of: dict[PageId, tuple[int, PrefixHash]] = {}  # of each indexed page its group, and its span's hash
        self._changes: list[CacheChange] | None = None

    @property
    def num_cached(self) -> int:
        """Return how many free pages hold a prefix that can be reused."""
        return sum(map(self.pool.is_free, self._span_of))

    @property
    def spans(self) -> Mapping[PrefixHash, Pages]:
        """The spans whose pages of the first group can be found, by hash. Of those, the other groups may lack some."""
        return MappingProxyType(self._index[0])

    @property
    def indexed(self) -> Iterator[tuple[int, PrefixHash, Pages]]:
        """Yield group, hash and pages of each span that can be found."""
        return ((group, *item) for group, index in enumerate(self._index) for item in index.items())

    def reuse(self, prefix: Prefix, max_spans: int, num_known: int = 0) -> Hit:
        """Hold the pages of the longest cached prefix, for one more sequence.

        num_known: so many first tokens will have KV from elsewhere before the first query; pages that none sees are
        not needed.
        """
        num_spans, index = 0, self._index[0]
        while num_spans < max_spans:
            if num_spans == len(prefix.hashes):
                self._hash(prefix, min(max_spans, num_spans + _HASHED_AT_ONCE))
            if num_spans == len(prefix.hashes) or prefix.hashes[num_spans] not in index:
                break
            num_spans += 1
        if not self.paging.is_single:
            num_spans = self._common_length(prefix, num_spans, num_known)
        hit = Hit(num_spans, self._cached(prefix, num_spans, num_known))
        self.pool.share(hit.pages.held)
        return hit

    def hold(self, prefix: Prefix, max_spans: int, step_tokens: int) -> Hit | None:
        """Hold pages to compute a prefix in steps of so many tokens, cached ones as far as they go.

        Or None, and change nothing. With windows these are the first pages; `extend` adds others in their place.
        """
        num_tokens, hit = len(prefix.token_ids), self.reuse(prefix, max_spans)
        ends = self.paging.ends(hit.num_spans * self.page_size, num_tokens, step_tokens)
        if not self.extend(hit.pages, ends):
            self.pool.release(hit.pages.held)
            return None
        return hit

    def extend(self, tables: PageTables, ends: Sequence[int]) -> bool:
        """Add pages up to these numbers in each group; or return False, and change nothing."""
        missing = [end - first - len(run) for end, first, run in zip(ends, tables.firsts, tables.runs, strict=True)]
        fresh, start = self.take(sum([max(0, count) for count in missing])), 0
        if fresh is None:
            return False
        for run, count in zip(tables.runs, missing, strict=True):
            if count > 0:
                run.extend(fresh[start : start + count])
                start += count
        return True

    def take(self, count: int) -> Pages | None:
        """Hold `count` pages with nothing in them, or None (and change nothing)."""
        return self._fresh(self.pool.take(count))

    def grant(self, count: int) -> Pages | None:
        """Set `count` pages aside for a hand-off, or None (and change nothing)."""
        return self._fresh(self.pool.grant(count))

    def publish(self, prefix: Prefix, pages: PageTables, run: range) -> None:
        """Index the sequence's pages of the spans in `run`: their KV is complete.

        A page that is indexed already keeps its hash, and a hash that is indexed already keeps its pages. Of a span
        that has left a group's window, nothing is indexed in that group.
        """
        self._hash(prefix, run.stop)
        run = range(run.start, min(run.stop, len(prefix.hashes)))
        for group in range(len(pages.runs)):
            self._publish(group, prefix, pages, run)

    def _publish(self, group: int, prefix: Prefix, pages: PageTables, run: range) -> None:
        per_span, row, first = self.page_size // self.paging.sizes[group], pages.runs[group], pages.firsts[group]
        index, span_of, start = self._index[group], self._span_of, run.start
        for number in run:
            place = number * per_span - first
            span, hash_ = tuple(row[place : place + per_span]) if place >= 0 else (), prefix.hashes[number]
            if len(span) < per_span or hash_ in index or not span_of.keys().isdisjoint(span):
                self._note_stored(prefix, range(start, number), group)
                start = number + 1
            else:
                index[hash_] = span
                for page in span:
                    span_of[page] = group, hash_
        self._note_stored(prefix, range(start, run.stop), group)

    def take_changes(self) -> list[CacheChange]:
        """Return what has changed since the last call, in order. The first call returns nothing and begins the record.

        All changes, applied to what was cached at the first call, give what is cached now.
        """
        changes, self._changes = self._changes or [], []
        return changes

    def check(self) -> None:
        """Raise InvariantError unless the pool adds up and no page under a writer is indexed."""
        self.pool.check()
        wrong = self.pool.set_aside(self._span_of)
        if wrong:
            raise InvariantError(f"pages {sorted(wrong)} are indexed, but granted or quarantined")

    def _common_length(self, prefix: Prefix, num_spans: int, num_known: int) -> int:
        """Return for how many of its first spans a prefix has all pages that later queries need, in every group."""
        while num_spans and (lack := self._last_lack(prefix, num_spans, num_known)) is not None:
            num_spans = lack
        return num_spans

    def _last_lack(self, prefix: Prefix, num_spans: int, num_known: int) -> int | None:
        """Return the last span of so many that a group needs and lacks, or None."""
        lacks = [
            number
            for group, index in enumerate(self._index)
            for number in self._needed(group, num_spans, num_known)
            if prefix.hashes[number] not in index
        ]
        return max(lacks, default=None)

    def _needed(self, group: int, num_spans: int, num_known: int) -> range:
        """Return the spans of a prefix that queries see in a group that come after it, and after known tokens."""
        first = self.paging.first_needed(group, max(num_spans * self.page_size, num_known))
        return range(min(num_spans, first * self.paging.sizes[group] // self.page_size), num_spans)

    def _cached(self, prefix: Prefix, num_spans: int, num_known: int) -> PageTables:
        """Return the pages of a cached prefix that later queries need."""
        hashes = prefix.hashes
        if self.paging.is_single:
            index = self._index[0]
            return PageTables(([index[hash_][0] for hash_ in hashes[:num_spans]],))
        needed = [self._needed(group, num_spans, num_known) for group in range(len(self._index))]
        runs = tuple(
            [page for number in spans for page in index[hashes[number]]]
            for spans, index in zip(needed, self._index, strict=True)
        )
        sizes = self.paging.sizes
        found = PageTables(runs, [s.start * self.page_size // size for s, size in zip(needed, sizes, strict=True)])
        # These are a span's first pages; nothing is held yet.
        found.take_unneeded(self.paging, max(num_spans * self.page_size, num_known))
        return found

    def _hash(self, prefix: Prefix, num_spans: int) -> None:
        """Hash a sequence's full spans, up to `num_spans` of them."""
        hashes, size = prefix.hashes, self.page_size
        stop = min(num_spans, len(prefix.token_ids) // size)
        if self._hasher is None or stop <= len(hashes):
            return
        parent = hashes[-1] if hashes else self._hasher.root(prefix.scope)
        blocks = self._hasher.extend(parent, prefix.token_ids[len(hashes) * size : stop * size])
        blocks_a_span = size // self._hasher.block_tokens
        hashes += blocks[blocks_a_span - 1 :: blocks_a_span]

    def _note_stored(self, prefix: Prefix, run: range, group: int) -> None:
        if self._changes is not None and run:
            self._changes.append(PagesStored(prefix, run, group))

    def _fresh(self, pages: Pages | None) -> Pages | None:
        """Take pages out of the index whose content is about to change."""
        removed: dict[int, list[PrefixHash]] = {}
        for page in pages or ():
            if (span := self._span_of.get(page)) is not None:
                group, hash_ = span
                for each in self._index[group].pop(hash_):
                    del self._span_of[each]
                removed.setdefault(group, []).append(hash_)
        if self._changes is not None:
            self._changes += [PagesRemoved(hashes, group) for group, hashes in removed.items()]
        return pages


class Room:
    """How many pages may wait for other workers, so that the longest prompt always finds room.

    These pages wait for other workers: those of prompts that have been granted no pages at their targets, those granted
    to arriving hand-offs, cached ones held for arriving hand-offs, and quarantined ones. Invariant: on a worker that
    may have prompts to hand off, they leave enough pages for the longest prompt.

    So a prompt that has been granted pages at its target can always start, whatever arrives here, and its own pages are
    free once it has left. A mixed worker leaves room for two: prompts that wait for grants also leave pages to grant
    the longest one. Otherwise two mixed workers whose prompts wait for each other's grants would wait for ever.
    """

    def __init__(self, cache: KvCache, longest: int) -> None:
        """`longest`: how many pages the longest prompt needs at most."""
        self._pool = cache.pool
        self.longest = longest
        self.is_kept_by_role = True
        self.ahead: dict[tuple[RequestId, Attempt], int] = {}  # of prompts to hand off; 0: not started, or granted
        self.num_pinned = 0  # cached ones, held for arriving hand-offs

    @property
    def num_granted(self) -> int:
        """Return how many pages arriving hand-offs keep from others."""
        return self._pool.num_granted + self.num_pinned

    @property
    def left(self) -> int:
        """Return how many more pages may wait for other workers; below 0: there is no room for the longest prompt."""
        num_waiting = sum(self.ahead.values()) + self.num_granted + self._pool.num_quarantined
        return self._pool.num_pages - self.longest - num_waiting

    @property
    def for_grants(self) -> int:
        """Return how many pages may be granted, as far as they are free."""
        return self.left if self.is_kept_by_role or self.ahead else self._pool.num_pages
