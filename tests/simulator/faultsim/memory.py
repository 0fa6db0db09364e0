"""One worker's pages as others see them: who may write where, who may be read, and what a prefix cache must hold.

Writes are one-sided: the owner of the pages is not asked, so a write is judged when it lands. What it was granted is
told by page and generation: no two grants ever name the same.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from faultsim.engine import SIZE, FakeRunner, beginning, chain, group_slot
from faultsim.ranks import ONE_RANK, Piece
from faultsim.world import ViolationError
from pdserve.base.ids import AttemptKey, Generation, PageId
from pdserve.engine.kvcache import KvCache, PagesStored
from pdserve.engine.step import StepPlan
from pdserve.kvtransfer.routes import Share
from pdserve.protocol.prefix_hash import PrefixHash


class Stamp(NamedTuple):
    """One page, as often as it had been given out when somebody was allowed to touch it."""

    page: PageId
    generation: Generation


class Memory:
    def __init__(self, name: str, runner: FakeRunner, cache: KvCache, shares: Sequence[Share] = ONE_RANK) -> None:
        """shares: what each rank of the process has of every page."""
        self._name, self.shares = name, shares
        self._runner = runner
        self._cache = cache
        self.page_bytes = runner.page_bytes
        self._due: dict[PrefixHash, bytes] = {}  # what a page of a prefix holds, whoever computed or sent it
        cache.take_changes()  # from now on they are noted

    def stamp(self, page: PageId) -> Stamp:
        return Stamp(page, *self._cache.pool.generations((page,)))

    def read(self, stamp: Stamp, key: AttemptKey) -> bytes:
        """Return a page's bytes for a copy; its content must have been kept for that."""
        self.check_source(stamp, key)
        return bytes(self._runner.page(stamp.page))

    def write(self, stamp: Stamp, key: AttemptKey, landed: Iterable[Piece]) -> None:
        """Write some bytes of a page from outside."""
        self.check_target(stamp, key)
        page = self._runner.page(stamp.page)
        for place, content in landed:
            page[place : place + len(content)] = content

    def content(self, page: PageId) -> bytes:
        return bytes(self._runner.page(page))

    def check_source(self, stamp: Stamp, key: AttemptKey) -> None:
        """Raise ViolationError unless the page is still held as it was."""
        pool = self._cache.pool
        if pool.holders(stamp.page) == 0 or self.stamp(stamp.page) != stamp:
            text = f"{self._name} released {stamp} under a copy for attempt {key.attempt}"
            raise ViolationError("I5", text, key.request_id)

    def check_target(self, stamp: Stamp, key: AttemptKey) -> None:
        """Raise ViolationError unless the page is still granted, or quarantined, as it was."""
        pool, page = self._cache.pool, stamp.page
        if self.stamp(page) != stamp or pool.holders(page) or pool.is_free(page):
            owner = f"{self.stamp(page)}, {pool.holders(page)} holders, free: {pool.is_free(page)}"
            text = f"a write of attempt {key.attempt} may reach {stamp} of {self._name}, which is {owner}"
            raise ViolationError("I5", text, key.request_id)

    def check_step(self, plan: StepPlan, announced: Iterable[PageId]) -> None:
        """Raise ViolationError where a step writes a page that is announced for a copy: its content is final."""
        sizes = self._cache.paging.sizes
        written = {
            page
            for chunk in plan.chunks
            for size, pages in zip(sizes, (chunk.pages, *chunk.other_pages), strict=True)
            for page in pages[chunk.start // size :]
        }
        both = written.union(target for _, target in plan.copies).intersection(announced)
        if both:
            raise ViolationError("I3", f"{self._name} announced {sorted(both)}, and a step writes them")

    def check_cache(self) -> None:
        """Raise ViolationError where a page that can be reused does not hold what its tokens say."""
        for change in self._cache.take_changes():
            if isinstance(change, PagesStored):
                self._expect(change)
        for group, prefix_hash, pages in self._cache.indexed:
            if b"".join([self._runner.page(page) for page in pages]) != self._due_in(group, prefix_hash):
                text = f"pages {pages} of {self._name} do not hold the prefix that they are found by"
                raise ViolationError("I3", text)

    def _due_in(self, group: int, prefix_hash: PrefixHash) -> bytes:
        """Return what the pages of a span hold in a group."""
        due, shape = self._due[prefix_hash], self._cache.paging.shapes[group]
        if group == 0:
            return due
        if shape.is_state:
            return group_slot(group, int.from_bytes(due[-SIZE:], "little"), self.page_bytes)
        width = self.page_bytes // shape.page_size
        states = [int.from_bytes(due[place : place + SIZE], "little") for place in range(0, len(due), SIZE)]
        return b"".join([group_slot(group, state, width) for state in states])

    def _expect(self, stored: PagesStored) -> None:
        """Compute what pages hold that can be reused from now on."""
        hashes, tokens, size = stored.prefix.hashes, stored.prefix.token_ids, self._cache.page_size
        for number in range(stored.run.stop):
            if hashes[number] not in self._due:
                before = self._due[hashes[number - 1]][-SIZE:] if number else b""
                state = int.from_bytes(before, "little") if before else beginning(stored.prefix.scope.adapter)
                self._due[hashes[number]] = chain(state, tokens[number * size : (number + 1) * size])
