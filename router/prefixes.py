"""Which workers probably hold which prefixes: what was routed to them, for a while. Pure.

A hint that placement may be wrong about: workers name their pages themselves, and forget them as they please.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq

from pdserve.router.events import LinkId

BLOCK = 64  # tokens
MAX_NAMES = 65536
LIFE_S = 600.0  # workers correct what is no longer so, as they begin to compute

Names = tuple[int, ...]


def block_names(token_ids: Seq[int], salt: str) -> Names:
    """Return the names of a prompt's full blocks, chained, so that equal names mean equal prefixes."""
    names, parent = [], hash(salt)
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        parent = hash((parent, *token_ids[start : start + BLOCK]))
        names.append(parent)
    return tuple(names)


class PrefixTable:
    """Names of blocks, and until when each worker is taken to hold them. The least used is forgotten first."""

    def __init__(self, life_s: float = LIFE_S, max_names: int = MAX_NAMES) -> None:
        self._life_s = life_s
        self._max_names = max_names
        self._holders: OrderedDict[int, dict[LinkId, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, link: LinkId, names: Names, now_s: float) -> None:
        """Note that a worker will hold these blocks."""
        until_s = now_s + self._life_s
        for name in reversed(names):  # a prefix is kept longer than what it leads to
            self._holders.setdefault(name, {})[link] = until_s
            self._holders.move_to_end(name)
        while len(self._holders) > self._max_names:
            self._holders.popitem(last=False)

    def match(self, names: Names, now_s: float) -> dict[LinkId, int]:
        """Return how many leading tokens each worker holds; workers that hold none are left out."""
        found: dict[LinkId, int] = {}
        for count, name in enumerate(names):
            holders = self._holders.get(name)
            if holders is None:
                break
            going_on = False
            for link, until_s in holders.items():
                if until_s >= now_s and found.get(link, 0) == count * BLOCK:
                    found[link] = (count + 1) * BLOCK
                    going_on = True
            if not going_on:
                break
        return found

    def correct(self, link: LinkId, names: Names, num_tokens: int) -> None:
        """Note that a worker held no more than this of a prompt."""
        for name in names[-(-num_tokens // BLOCK) :]:
            holders = self._holders.get(name)
            if holders is not None and holders.pop(link, None) is not None and not holders:
                del self._holders[name]

    def forget(self, link: LinkId) -> None:
        """Drop a worker that has left."""
        for name in [name for name, holders in self._holders.items() if link in holders]:
            holders = self._holders[name]
            del holders[link]
            if not holders:
                del self._holders[name]
