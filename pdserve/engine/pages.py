"""Which KV pages are free, held by sequences, granted to a hand-off, or quarantined.

Invariant: these four partition the pool, always. A page is given out (and its generation counts up) only when it is
free, so a page that a lost peer may still write to is nobody else's.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import cast

from pdserve.base.errors import InvariantError
from pdserve.base.ids import Generation, PageId
from pdserve.protocol.page_tables import Pages


class PagePool:
    """A fixed set of pages. The page that has been free for longest is given out first."""

    def __init__(self, num_pages: int) -> None:
        self._free: OrderedDict[PageId, None] = OrderedDict((PageId(i), None) for i in range(num_pages + 1))
        self._free.popitem()  # room where they fill the table: the first to come back would rehash it
        self._holders = [0] * num_pages
        self._generation = [0] * num_pages
        self._granted: set[PageId] = set()
        self._quarantined: set[PageId] = set()

    @property
    def num_pages(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_granted(self) -> int:
        return len(self._granted)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_holds(self) -> int:
        """Return how many holds there are on all pages; a page may have several."""
        return sum(self._holders)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free - self.num_granted - self.num_quarantined

    def generations(self, pages: Iterable[PageId]) -> tuple[Generation, ...]:
        generation = self._generation
        return cast("tuple[Generation, ...]", tuple([generation[page] for page in pages]))

    def holders(self, page: PageId) -> int:
        return self._holders[page]

    def is_free(self, page: PageId) -> bool:
        return page in self._free

    def is_granted(self, page: PageId) -> bool:
        return page in self._granted

    def is_quarantined(self, page: PageId) -> bool:
        return page in self._quarantined

    def set_aside(self, pages: Iterable[PageId]) -> set[PageId]:
        """Return which of these pages are granted or quarantined: a peer may write to them."""
        return (self._granted | self._quarantined).intersection(pages)

    def take(self, count: int) -> Pages | None:
        """Give `count` free pages one holder each, or None (and change nothing) if there are not enough."""
        pages = self._pop(count)
        holders = self._holders
        for page in pages or ():
            holders[page] = 1
        return pages

    def share(self, pages: Iterable[PageId]) -> None:
        """Add a holder to each page: to held ones, and to free ones whose content is still wanted."""
        free, holders = self._free, self._holders
        for page in pages:
            if page in free:
                del free[page]
            elif holders[page] == 0:
                raise InvariantError(f"page {page} is neither free nor held and cannot be shared")
            holders[page] += 1

    def release(self, pages: Pages) -> None:
        """Drop one hold on each page. Last pages first, so that prefixes stay warm longest."""
        free, holders = self._free, self._holders
        for page in reversed(pages):
            left = holders[page] - 1
            if left < 0:
                raise InvariantError(f"page {page} released, but nobody holds it")
            holders[page] = left
            if not left:
                free[page] = None

    def grant(self, count: int) -> Pages | None:
        """Set `count` free pages aside for a hand-off, or None (and change nothing) if there are not enough."""
        pages = self._pop(count)
        self._granted.update(pages or ())
        return pages

    def adopt(self, pages: Pages) -> None:
        """Turn granted pages into held ones: what was written into them is a sequence's."""
        self._leave(self._granted, pages, "granted")
        holders = self._holders
        for page in pages:
            holders[page] = 1

    def ungrant(self, pages: Pages) -> None:
        """Free granted pages that no write can reach; the last ones first, as in `release`."""
        self._leave(self._granted, pages, "granted")
        self._free.update((page, None) for page in reversed(pages))

    def quarantine(self, pages: Pages) -> None:
        """Keep granted pages from all use, because a write may still reach them."""
        self._leave(self._granted, pages, "granted")
        self._quarantined.update(pages)

    def unquarantine(self, pages: Pages) -> None:
        """Free quarantined pages, the last ones first: it is proven that no write can reach them."""
        self._leave(self._quarantined, pages, "quarantined")
        self._free.update((page, None) for page in reversed(pages))

    def check(self) -> None:
        """Raise InvariantError unless free, held, granted and quarantined pages partition the pool."""
        held = [page for page, holders in enumerate(self._holders) if holders > 0]
        num_states = len(self._free) + len(held) + len(self._granted) + len(self._quarantined)
        if num_states == self.num_pages == len({*self._free, *held, *self._granted, *self._quarantined}):
            return
        for page in map(PageId, range(self.num_pages)):
            states = (page in self._free, self._holders[page] > 0, page in self._granted, page in self._quarantined)
            if sum(states) != 1:
                raise InvariantError(f"page {page}: free, held, granted, quarantined = {states}")

    def _pop(self, count: int) -> Pages | None:
        if count > len(self._free):
            return None
        pages, free, generation = tuple(islice(self._free, count)), self._free, self._generation
        for page in pages:
            del free[page]
            generation[page] += 1
        return pages

    def _leave(self, state: set[PageId], pages: Pages, name: str) -> None:
        if not state.issuperset(pages):
            raise InvariantError(f"pages {sorted(set(pages) - state)} are not {name}")
        state.difference_update(pages)
