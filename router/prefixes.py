"""Which workers hold which prefixes: what they say, and what was routed to them, for a while. Pure.

Invariant: a block that a worker told of counts as held until that worker takes it back. Only what was routed is
forgotten by itself: after its time, or when it is more than the worker can hold.

What was routed is a hint that placement may be wrong about: a worker that tells of its pages corrects it soon, one that
does not is believed to hold it for longer.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf

from pdserve.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from pdserve.router.events import LinkId
from pdserve.router.pages import BLOCK, BLOCK_BYTES, MAX_BLOCKS, Names, WorkerPages, chain, root_name
from pdserve.token_ids import to_wire

LIFE_S = 600.0  # of what was routed to a worker that says nothing of its pages
TOLD_LIFE_S = 10.0  # of what was routed to one that does: it has told of it by then, or never will


def block_names(token_ids: Seq[int], salt: str) -> Names:
    """Return the names of a prompt's full blocks, chained, so that equal names mean equal prefixes."""
    names, parent, packed = [], root_name(salt), to_wire(token_ids)
    for start in range(0, len(packed) - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = chain(parent, packed[start : start + BLOCK_BYTES])
        names.append(parent)
    return tuple(names)


@dataclass(slots=True, eq=False)
class _Holder:
    """What one worker is taken to hold."""

    max_blocks: int  # that fit in its pages
    routed: OrderedDict[int, float] = field(default_factory=OrderedDict)  # until when; the least used first
    told: set[int] = field(default_factory=set)
    pages: WorkerPages | None = None  # of a worker that tells of them

    def num_leading(self, names: Names, now_s: float) -> int:
        """Return how many of the leading blocks it holds."""
        told, routed = self.told, self.routed
        for number, name in enumerate(names):
            if name not in told and routed.get(name, -inf) < now_s:
                return number
        return len(names)


class PrefixTable:
    """Names of blocks that each worker is taken to hold."""

    def __init__(self, life_s: float = LIFE_S) -> None:
        self._life_s = life_s
        self._holders: dict[LinkId, _Holder] = {}

    def __len__(self) -> int:
        return sum(len(holder.told | holder.routed.keys()) for holder in self._holders.values())

    def attach(self, link: LinkId, num_tokens: int) -> None:
        """Note how many tokens a worker's pages can hold."""
        max_blocks = min(num_tokens // BLOCK, MAX_BLOCKS)
        self._holders.setdefault(link, _Holder(max_blocks)).max_blocks = max_blocks

    def note(self, links: Iterable[LinkId], names: Names, now_s: float) -> None:
        """Note that these workers will hold these blocks."""
        for link in links:
            holder = self._holders.get(link)
            if holder is None:
                continue
            routed, until_s = holder.routed, now_s + (self._life_s if holder.pages is None else TOLD_LIFE_S)
            for name in reversed(names):  # a prefix is kept longer than what it leads to
                routed[name] = until_s
                routed.move_to_end(name)
            while len(routed) > holder.max_blocks:
                routed.popitem(last=False)

    def tell(self, link: LinkId, events: Iterable[KvEvent]) -> None:
        """Take in what a worker says of its pages."""
        holder = self._holders.get(link)
        if holder is None:
            return
        pages = holder.pages = holder.pages or WorkerPages()
        for event in events:
            match event:
                case BlockStored():
                    holder.told.update(pages.stored(event))
                case BlockRemoved(hashes):
                    gone = pages.removed(hashes)
                    holder.told.difference_update(gone)
                    for name in gone:
                        holder.routed.pop(name, None)
                case AllBlocksCleared():
                    pages = holder.pages = WorkerPages()
                    holder.told.clear()
                    holder.routed.clear()

    def match(self, names: Names, now_s: float) -> dict[LinkId, int]:
        """Return how many leading tokens each worker holds; workers that hold none are left out."""
        found = {link: holder.num_leading(names, now_s) for link, holder in self._holders.items()} if names else {}
        return {link: number * BLOCK for link, number in found.items() if number}

    def forget(self, link: LinkId) -> None:
        """Drop a worker that has left."""
        self._holders.pop(link, None)
