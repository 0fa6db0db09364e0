"""Pages and the prefixes they hold, kept consistent.

Invariant: an indexed page still holds the KV that its name says; it leaves the index the moment it is given out.
"""

from collections.abc import Sequence

from pdserve.engine.journal import Journal
from pdserve.engine.pages import PagePool, Pages
from pdserve.engine.prefix import PageName, PrefixIndex, PrefixNames
from pdserve.errors import InvariantError
from pdserve.ids import PageId
from pdserve.values import value


@value
class Content:
    """What pages hold: tokens from position 0 on, under a salt."""

    token_ids: Sequence[int]
    salt: str


class KvCache:
    """One worker's pages. `pool` is for reading; pages are given out through this class only."""

    def __init__(self, num_pages: int, page_size: int, names: PrefixNames | None) -> None:
        """Without `names`, nothing is reused."""
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self._names = names
        self._index = PrefixIndex()
        self.journal: Journal | None = None  # where changes of the index are noted, once somebody reads them

    @property
    def num_cached(self) -> int:
        """Return how many free pages hold a prefix that can be reused."""
        return sum(map(self.pool.is_free, self._index.pages()))

    def num_pages(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def names(self, token_ids: Sequence[int], salt: str) -> list[PageName]:
        """Return the names of all full pages of a sequence; empty when nothing is reused."""
        return [] if self._names is None else self._names.extend(self._names.root(salt), token_ids, 0)

    def extend_names(self, names: list[PageName], token_ids: Sequence[int], salt: str) -> None:
        """Add the names of pages that have become full since."""
        start = len(names) * self.page_size
        if self._names is not None and len(token_ids) >= start + self.page_size:
            parent = names[-1] if names else self._names.root(salt)
            names.extend(self._names.extend(parent, token_ids, start))

    def reuse(self, names: Sequence[PageName]) -> Pages:
        """Hold the pages of the longest known prefix, for one more sequence."""
        pages = self._index.match(names)
        self.pool.share(pages)
        return pages

    def take(self, count: int) -> Pages | None:
        """Hold `count` pages with nothing in them, or None (and change nothing)."""
        return self._fresh(self.pool.take(count))

    def grant(self, count: int) -> Pages | None:
        """Set `count` pages aside for a hand-off, or None (and change nothing)."""
        return self._fresh(self.pool.grant(count))

    def publish(self, names: Sequence[PageName], pages: Sequence[PageId], run: range, content: Content) -> None:
        """Index the pages `run` of a sequence, by number: their KV is complete. `content` is the sequence's."""
        added = self._index.add(names, pages, range(run.start, min(run.stop, len(names))))
        if self.journal is not None:
            for each in added:
                self.journal.stored(names, each, content.token_ids, self.page_size, content.salt)

    def check(self) -> None:
        """Raise InvariantError unless the pool adds up and no page under a writer is indexed."""
        self.pool.check()
        wrong = self.pool.set_aside(self._index.pages())
        if wrong:
            raise InvariantError(f"pages {sorted(wrong)} are indexed, but granted or quarantined")

    def _fresh(self, pages: Pages | None) -> Pages | None:
        if pages is not None:
            names = self._index.forget(pages)
            if self.journal is not None:
                self.journal.removed(names)
        return pages
