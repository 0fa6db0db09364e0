"""One worker's pages as others see them: who may write where, and who may be read.

Writes are one-sided: the owner of the pages is not asked, so a write is judged when it lands. What it was granted is
told by page and generation: no two grants ever name the same.
"""

from typing import NamedTuple

from faultsim.engine import FakeRunner
from faultsim.world import ViolationError
from pdserve.engine.kvcache import KvCache
from pdserve.ids import Generation, PageId
from pdserve.kvtransfer.session import HandoffKey


class Stamp(NamedTuple):
    """One page, as often as it had been given out when somebody was allowed to touch it."""

    page: PageId
    generation: Generation


class Memory:
    """The pages of one process."""

    def __init__(self, name: str, runner: FakeRunner, cache: KvCache) -> None:
        self._name = name
        self._runner = runner
        self._cache = cache
        self.page_bytes = runner.page_bytes

    def stamp(self, page: PageId) -> Stamp:
        return Stamp(page, self._cache.pool.generation(page))

    def read(self, stamp: Stamp, key: HandoffKey) -> bytes:
        """Return a page's bytes for a copy; its content must have been kept for that."""
        self.check_source(stamp, key)
        return bytes(self._runner.page(stamp.page))

    def write(self, stamp: Stamp, key: HandoffKey, content: bytes) -> None:
        """Write the first bytes of a page from outside."""
        self.check_target(stamp, key)
        self._runner.page(stamp.page)[: len(content)] = content

    def content(self, page: PageId) -> bytes:
        return bytes(self._runner.page(page))

    def check_source(self, stamp: Stamp, key: HandoffKey) -> None:
        """Raise ViolationError unless the page is still held as it was."""
        pool = self._cache.pool
        if pool.holders(stamp.page) == 0 or pool.generation(stamp.page) != stamp.generation:
            text = f"{self._name} released {stamp} under a copy for attempt {key.attempt}"
            raise ViolationError("I5", text, key.request_id)

    def check_target(self, stamp: Stamp, key: HandoffKey) -> None:
        """Raise ViolationError unless the page is still granted, or quarantined, as it was."""
        pool, page = self._cache.pool, stamp.page
        if pool.generation(page) != stamp.generation or pool.holders(page) or pool.is_free(page):
            owner = f"generation {pool.generation(page)}, {pool.holders(page)} holders, free: {pool.is_free(page)}"
            text = f"a write of attempt {key.attempt} may reach {stamp} of {self._name}, which is {owner}"
            raise ViolationError("I5", text, key.request_id)
