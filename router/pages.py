"""A worker's pages as blocks of the router's: pages are named by their worker and have any size, blocks have one. Pure.

Invariant: a block counts as held only while each page that has tokens of it was told as stored, and not as removed
since, in whatever order pages come and go.
"""

from collections.abc import Iterable

import msgspec

from pdserve.kvevents import BlockStored, Hash
from pdserve.token_ids import TOKEN_ID_BYTES, to_wire

BLOCK = 64  # tokens
BLOCK_BYTES = BLOCK * TOKEN_ID_BYTES
MAX_PAGES = 1 << 20  # of one worker; more are not looked at
MAX_BLOCKS = 1 << 20  # the same

Names = tuple[int, ...]


def root_name(salt: str) -> int:
    """Return the name before a sequence's first block."""
    return hash(salt)


def chain(parent: int, packed: bytes) -> int:
    """Return the name of the block of these tokens, packed, that follows another."""
    return hash((parent, packed))


class _Page(msgspec.Struct, gc=False):
    """A page, and how to go on from its end.

    Made by the million: tokens are packed, tuples are shared, and the garbage collector, which would stop the router
    for a tenth of a second to look at them all, does not know of them.
    """

    name: int  # of the last whole block before its end
    tail: bytes  # its tokens after that block
    before: "_Page | None"  # holds the tokens before its own, where its first block begins earlier
    whole: Names = ()  # blocks that end in it
    later: Names = ()  # blocks that begin in or before it and end in a later page
    is_held: bool = True


class WorkerPages:
    """What one worker has told of its pages."""

    def __init__(self) -> None:
        self._pages: dict[Hash, _Page] = {}
        self._num_blocks = 0

    def stored(self, event: BlockStored) -> list[int]:
        """Return the blocks that are whole by it. Pages after one that was never told of, or removed, are left out."""
        names: list[int] = []
        if len(self._pages) + len(event.block_hashes) > MAX_PAGES:
            return names
        if self._num_blocks + len(event.token_ids) // BLOCK > MAX_BLOCKS:
            return names
        page = None if event.parent_block_hash is None else self._pages.get(event.parent_block_hash)
        if page is None and event.parent_block_hash is not None:
            return names
        packed, page_bytes = to_wire(event.token_ids), event.block_size * TOKEN_ID_BYTES
        name = root_name(event.salt()) if page is None else page.name
        begun = _unfinished(page)
        for number, key in enumerate(event.block_hashes):
            page = self._pages.get(key)
            if page is not None:
                begun = _unfinished(page)
            elif begun is None:
                break
            else:
                page = _extend(begun, name, packed[number * page_bytes : (number + 1) * page_bytes])
                begun = _begun_after(begun, page)
                self._pages[key] = page
                names += page.whole
            name = page.name
        self._num_blocks += len(names)
        return names

    def removed(self, keys: Iterable[Hash]) -> list[int]:
        """Return the blocks that are no longer whole."""
        names: list[int] = []
        for key in keys:
            page = self._pages.pop(key, None)
            if page is None:
                continue
            self._num_blocks -= len(page.whole)
            names += page.whole
            names += page.later
            _part(page)
        return names


def _unfinished(page: _Page | None) -> list[_Page] | None:
    """Return the pages, in order, that hold tokens of the block under way at a page's end; None if one is gone."""
    pages: list[_Page] = []
    while page is not None and page.tail:
        if not page.is_held:
            return None
        pages.append(page)
        page = None if page.whole else page.before
    return pages[::-1]


def _begun_after(begun: list[_Page], page: _Page) -> list[_Page]:
    """Return the same as `_unfinished` for a page that has just followed these."""
    if not page.tail:
        return []
    return [page] if page.whole else [*begun, page]


def _extend(begun: list[_Page], name: int, packed: bytes) -> _Page:
    """Return the page with these tokens that follows the pages of a block under way."""
    before = begun[-1] if begun else None
    rest = b"".join([page.tail for page in begun]) + packed
    if len(rest) < BLOCK_BYTES:
        return _Page(name, packed, before)
    whole = []
    for start in range(0, len(rest) - BLOCK_BYTES + 1, BLOCK_BYTES):
        name = chain(name, rest[start : start + BLOCK_BYTES])
        whole.append(name)
    first = (whole[0],)
    for page in begun:
        page.later = page.later + first if page.later else first
    return _Page(name, rest[len(whole) * BLOCK_BYTES :], before, first if len(whole) == 1 else tuple(whole))


def _part(page: _Page) -> None:
    """Take a page that is removed from those before it: they forget the blocks that they shared with it."""
    broken, before = {*page.whole[:1], *page.later}, page.before
    while before is not None:
        before.later = tuple([name for name in before.later if name not in broken])
        before = None if before.whole else before.before
    page.is_held, page.before = False, None
