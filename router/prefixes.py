"""Which workers hold which prefixes: what they say, and what was routed to them, for a while. Pure.

What was routed is a hint that placement may be wrong about: a worker that tells of its pages corrects it soon, one that
does not is believed to hold it for longer.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import inf

from pdserve.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from pdserve.router.events import LinkId
from pdserve.router.pages import BLOCK, Names, WorkerPages, chain, root_name

MAX_NAMES = 65536
LIFE_S = 600.0  # of what was routed to a worker that says nothing of its pages
TOLD_LIFE_S = 10.0  # of what was routed to one that does: it has told of it by then, or never will


def block_names(token_ids: Seq[int], salt: str) -> Names:
    """Return the names of a prompt's full blocks, chained, so that equal names mean equal prefixes."""
    names, parent = [], root_name(salt)
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        parent = chain(parent, token_ids[start : start + BLOCK])
        names.append(parent)
    return tuple(names)


class PrefixTable:
    """Names of blocks, and until when each worker is taken to hold them. The least used is forgotten first."""

    def __init__(self, life_s: float = LIFE_S, max_names: int = MAX_NAMES) -> None:
        self._life_s = life_s
        self._max_names = max_names
        self._holders: OrderedDict[int, dict[LinkId, float]] = OrderedDict()
        self._pages: dict[LinkId, WorkerPages] = {}  # of workers that tell of them

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, links: Iterable[LinkId], names: Names, now_s: float) -> None:
        """Note that these workers will hold these blocks."""
        pages, life_s = self._pages, self._life_s
        self._hold({link: now_s + (TOLD_LIFE_S if link in pages else life_s) for link in links}, names)

    def tell(self, link: LinkId, events: Iterable[KvEvent]) -> None:
        """Take in what a worker says of its pages."""
        pages = self._pages.setdefault(link, WorkerPages())
        for event in events:
            match event:
                case BlockStored():
                    self._hold({link: inf}, pages.stored(event))
                case BlockRemoved(hashes):
                    self._drop(link, pages.removed(hashes))
                case AllBlocksCleared():
                    self.forget(link)
                    pages = self._pages[link] = WorkerPages()

    def match(self, names: Names, now_s: float) -> dict[LinkId, int]:
        """Return how many leading tokens each worker holds; workers that hold none are left out."""
        found: dict[LinkId, int] = {}
        holding: Iterable[LinkId] | None = None  # all blocks so far
        for num_tokens, name in enumerate(names, start=1):
            holders = self._holders.get(name)
            if holders is None:
                break
            holding = [link for link in (holders if holding is None else holding) if holders.get(link, -inf) >= now_s]
            if not holding:
                break
            for link in holding:
                found[link] = num_tokens * BLOCK
        return found

    def forget(self, link: LinkId) -> None:
        """Drop a worker that has left, or holds nothing any longer."""
        self._pages.pop(link, None)
        self._drop(link, [name for name, holders in self._holders.items() if link in holders])

    def _hold(self, until_s: dict[LinkId, float], names: Seq[int]) -> None:
        """Take workers to hold blocks until their times, and whom is taken to hold one for longer, so long."""
        table = self._holders
        for name in reversed(names):  # a prefix is kept longer than what it leads to
            holders = table.get(name)
            if holders is None:
                table[name] = until_s.copy()
                continue
            table.move_to_end(name)
            for link, until in until_s.items():
                if holders.get(link, 0.0) < until:
                    holders[link] = until
        while len(table) > self._max_names:
            table.popitem(last=False)

    def _drop(self, link: LinkId, names: Iterable[int]) -> None:
        for name in names:
            holders = self._holders.get(name)
            if holders is not None and holders.pop(link, None) is not None and not holders:
                del self._holders[name]
