"""A worker's pages as blocks of the router's: pages are named by their worker and have any size, blocks have one. Pure.

Invariant: a block counts as held only while each page that has tokens of it was told as stored, and not as removed
since, in whatever order pages come and go.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pdserve.kvevents import BlockStored, Hash

BLOCK = 64  # tokens
MAX_PAGES = 1 << 20  # of one worker; more are not looked at

Names = tuple[int, ...]


def root_name(salt: str) -> int:
    """Return the name before a sequence's first block."""
    return hash(salt)


def chain(parent: int, token_ids: Seq[int]) -> int:
    """Return the name of the block of these tokens that follows another."""
    return hash((parent, tuple(token_ids)))


@dataclass(frozen=True, slots=True)
class _End:
    """Where a page's tokens end: after whole blocks and some tokens of the next, which these pages hold."""

    name: int  # of the last whole block
    rest: tuple[int, ...]
    pages: tuple[Hash, ...]


class WorkerPages:
    """What one worker has told of its pages."""

    def __init__(self) -> None:
        self._ends: dict[Hash, _End] = {}
        self._blocks: dict[Hash, list[int]] = {}  # that a page holds tokens of

    def stored(self, event: BlockStored) -> Names:
        """Return the blocks that are whole by it. Pages after one that was never told of are left out."""
        size = event.block_size
        names: list[int] = []
        if len(self._ends) + len(event.block_hashes) > MAX_PAGES:
            return ()
        parent = event.parent_block_hash
        end = _End(root_name(event.salt()), (), ()) if parent is None else self._ends.get(parent)
        if end is None:
            return ()
        for number, page in enumerate(event.block_hashes):
            end, whole = _extend(end, page, event.token_ids[number * size : (number + 1) * size])
            self._ends[page] = end
            self._blocks[page] = []
            for name, pages in whole:
                for each in pages:
                    if name not in self._blocks.get(each, (name,)):
                        self._blocks[each].append(name)
                if all(each in self._ends for each in pages):
                    names.append(name)
        return tuple(names)

    def removed(self, pages: Iterable[Hash]) -> list[int]:
        """Return the blocks that are no longer whole."""
        names: list[int] = []
        for page in pages:
            self._ends.pop(page, None)
            names += self._blocks.pop(page, ())
        return names


def _extend(end: _End, page: Hash, token_ids: Seq[int]) -> tuple[_End, list[tuple[int, tuple[Hash, ...]]]]:
    """Return where a page ends that follows `end`, and the blocks that it makes whole, each with its pages."""
    name, rest, pages = end.name, (*end.rest, *token_ids), (*end.pages, page)
    whole = []
    while len(rest) >= BLOCK:
        name = chain(name, rest[:BLOCK])
        whole.append((name, pages))
        rest = rest[BLOCK:]
        pages = (page,)
    return _End(name, rest, pages if rest else ()), whole
