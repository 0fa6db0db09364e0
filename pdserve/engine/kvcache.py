"""A worker's KV pages, the prefixes found in them, and how many of them may wait for other workers. Pure.

Invariant: an indexed page still holds the KV that its hash says; it leaves the index the moment it is given out.

Full pages are found by content. A sequence's pages are hashed only as far as somebody looks for them, so a long prompt
that is not cached does not hold up a worker's loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pdserve.engine.pages import PagePool, Pages
from pdserve.errors import ConfigError, InvariantError
from pdserve.ids import Attempt, PageId, RequestId
from pdserve.prefix_hash import PrefixHash, PrefixHasher
from pdserve.values import value

_HASHED_AT_ONCE = 32  # pages


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens from position 0 on, under a salt, and the hashes of their full pages as far as they are known."""

    token_ids: Sequence[int]  # may grow
    salt: str
    hashes: list[PrefixHash] = field(default_factory=list)


@value
class PagesStored:
    """The sequence's pages with numbers in `run` can be reused from now on. Its earlier pages were stored before."""

    prefix: Prefix
    run: range

    @property
    def hashes(self) -> Sequence[PrefixHash]:
        return self.prefix.hashes[self.run.start : self.run.stop]


@value
class PagesRemoved:
    """These pages are about to be overwritten."""

    hashes: Sequence[PrefixHash]


CacheChange = PagesStored | PagesRemoved


class KvCache:
    """One worker's pages. This class alone gives out pages: nobody else calls the pool's `take` and `grant`."""

    def __init__(self, num_pages: int, page_size: int, hasher: PrefixHasher | None) -> None:
        """Without `hasher`, nothing is reused. ConfigError if blocks of tokens do not fill pages."""
        if hasher is not None and page_size % hasher.block_tokens:
            raise ConfigError(f"page_size: {page_size} is no multiple of {hasher.block_tokens}")
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self._hasher = hasher
        self._page_of: dict[PrefixHash, PageId] = {}
        self._hash_of: dict[PageId, PrefixHash] = {}
        self._changes: list[CacheChange] | None = None

    @property
    def num_cached(self) -> int:
        """Return how many free pages hold a prefix that can be reused."""
        return sum(map(self.pool.is_free, self._hash_of))

    @property
    def pages(self) -> Mapping[PrefixHash, PageId]:
        """The pages that can be found, by hash."""
        return MappingProxyType(self._page_of)

    def num_pages(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def reuse(self, prefix: Prefix, max_pages: int) -> Pages:
        """Hold the pages of the longest cached prefix, for one more sequence."""
        pages = list[PageId]()
        while len(pages) < max_pages:
            if len(pages) == len(prefix.hashes):
                self._hash(prefix, min(max_pages, len(pages) + _HASHED_AT_ONCE))
            page = self._page_of.get(prefix.hashes[len(pages)]) if len(pages) < len(prefix.hashes) else None
            if page is None:
                break
            pages.append(page)
        self.pool.share(pages)
        return tuple(pages)

    def take(self, count: int) -> Pages | None:
        """Hold `count` pages with nothing in them, or None (and change nothing)."""
        return self._fresh(self.pool.take(count))

    def grant(self, count: int) -> Pages | None:
        """Set `count` pages aside for a hand-off, or None (and change nothing)."""
        return self._fresh(self.pool.grant(count))

    def publish(self, prefix: Prefix, pages: Sequence[PageId], run: range) -> None:
        """Index the sequence's pages with numbers in `run`: their KV is complete.

        A page that is indexed already keeps its hash, and a hash that is indexed already keeps its page.
        """
        self._hash(prefix, run.stop)
        start, stop = run.start, min(run.stop, len(prefix.hashes))
        for number in range(start, stop):
            hash_, page = prefix.hashes[number], pages[number]
            if hash_ in self._page_of or page in self._hash_of:
                self._note_stored(prefix, range(start, number))
                start = number + 1
            else:
                self._page_of[hash_] = page
                self._hash_of[page] = hash_
        self._note_stored(prefix, range(start, stop))

    def take_changes(self) -> list[CacheChange]:
        """Return what has changed since the last call, in order. The first call returns nothing and begins the record.

        All changes, applied to what was cached at the first call, give what is cached now.
        """
        changes, self._changes = self._changes or [], []
        return changes

    def check(self) -> None:
        """Raise InvariantError unless the pool adds up and no page under a writer is indexed."""
        self.pool.check()
        wrong = self.pool.set_aside(self._hash_of)
        if wrong:
            raise InvariantError(f"pages {sorted(wrong)} are indexed, but granted or quarantined")

    def _hash(self, prefix: Prefix, num_pages: int) -> None:
        """Hash a sequence's full pages, up to `num_pages` of them."""
        hashes, size = prefix.hashes, self.page_size
        stop = min(num_pages, len(prefix.token_ids) // size)
        if self._hasher is None or stop <= len(hashes):
            return
        parent = hashes[-1] if hashes else self._hasher.root(prefix.salt)
        blocks = self._hasher.extend(parent, prefix.token_ids[len(hashes) * size : stop * size])
        blocks_a_page = size // self._hasher.block_tokens
        hashes += blocks[blocks_a_page - 1 :: blocks_a_page]

    def _note_stored(self, prefix: Prefix, run: range) -> None:
        if self._changes is not None and run:
            self._changes.append(PagesStored(prefix, run))

    def _fresh(self, pages: Pages | None) -> Pages | None:
        """Take pages out of the index whose content is about to change."""
        removed = []
        for page in pages or ():
            hash_ = self._hash_of.pop(page, None)
            if hash_ is not None:
                del self._page_of[hash_]
                removed.append(hash_)
        if self._changes is not None and removed:
            self._changes.append(PagesRemoved(removed))
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

    def __init__(self, cache: KvCache, max_model_len: int) -> None:
        self._pool = cache.pool
        self.longest = cache.num_pages(max_model_len)
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
