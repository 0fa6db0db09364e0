"""What a worker's prefix cache holds, as listeners hear of it: all of it when they come, then what changes. Pure.

Invariant: a listener who has heard all there is knows exactly the pages that can be reused, which are those that are
cached together with all pages before them. It hears of a page after the page before it, and once until that is removed.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from pdserve.engine.journal import CacheEvent, PagesRemoved, PagesStored
from pdserve.engine.prefix import PageName
from pdserve.kvevents import MEDIUM, BlockRemoved, BlockStored, KvEvent
from pdserve.token_ids import TOKEN_ID_BYTES, from_wire, to_wire

HASH_BYTES = 8  # listeners know hashes of 64 bits
SLICE_TOKENS = 4096  # stored ones told at once: they take about 0.5 ms to put together and encode
SLICE_REMOVED = 1024  # pages told at once to be gone
_SPARE = 1024  # removed pages that `_names` may hold, beside one for each reusable page, until it is rebuilt


class _Page(msgspec.Struct, gc=False):  # made by the million: the garbage collector need not look at them
    parent: PageName | None  # None: it begins a sequence
    packed: bytes  # its tokens
    salt: str
    number: int = 0  # counts up with each page that can be reused from now on


@dataclass(slots=True, eq=False)
class Listener:
    """How far one listener has been told."""

    told: int = 0  # the number up to which it knows of pages
    gone: list[PageName] = field(default_factory=list)  # pages that it knows of and that cannot be reused any longer


class CachedPages:
    """One worker's pages, from its cache's journal."""

    def __init__(self, slice_tokens: int = SLICE_TOKENS, slice_removed: int = SLICE_REMOVED) -> None:
        """Tell of so many tokens stored, and of so many pages removed, at once."""
        self._slice_bytes = slice_tokens * TOKEN_ID_BYTES
        self._slice_removed = slice_removed
        self._reusable: dict[PageName, _Page] = {}
        self._cut_off: dict[PageName, _Page] = {}  # cached, but a page before them is not
        self._children: dict[PageName, list[PageName]] = {}  # by parent, whether that is cached or not
        self._numbers = array("Q")  # with `_names`: pages by number, among them some that are gone
        self._names: list[PageName] = []
        self._last_number = 0
        self._listeners: list[Listener] = []

    def listen(self) -> Listener:
        """Return a listener that knows of nothing yet. Its owner calls `leave` in the end."""
        listener = Listener()
        self._listeners.append(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def has_news(self, listener: Listener) -> bool:
        return bool(listener.gone) or listener.told < self._last_number

    def apply(self, changes: Iterable[CacheEvent]) -> None:
        """Take in what changed in the cache."""
        for change in changes:
            match change:
                case PagesStored():
                    self._store(change)
                case PagesRemoved(names):
                    for name in names:
                        self._remove(name)
        if len(self._names) > 2 * len(self._reusable) + _SPARE:
            self._names = list(self._reusable)
            self._numbers = array("Q", [page.number for page in self._reusable.values()])

    def next_events(self, listener: Listener) -> list[KvEvent]:
        """Return what a listener is to be told next, a bounded part of it; after that it counts as told."""
        events: list[KvEvent] = []
        if listener.gone:
            names, listener.gone = listener.gone[: self._slice_removed], listener.gone[self._slice_removed :]
            events.append(BlockRemoved([_hash(name) for name in names], MEDIUM))
        if not listener.gone:  # a page that is stored again is told of after its removal
            names, listener.told = self._slice(listener.told)
            events += [_stored(run) for run in self._runs(names)]
        return events

    def _store(self, change: PagesStored) -> None:
        parent, packed, size = change.parent, to_wire(change.token_ids), change.page_size * TOKEN_ID_BYTES
        for number, name in enumerate(change.names):
            self._cut_off[name] = _Page(parent, packed[number * size : (number + 1) * size], change.salt)
            if parent is not None:
                self._children.setdefault(parent, []).append(name)
            if parent is None or parent in self._reusable:
                self._connect(name)
            parent = name

    def _connect(self, first: PageName) -> None:
        """Let a page and all that follow it be reusable."""
        names = [first]
        while names:
            name = names.pop()
            page = self._reusable[name] = self._cut_off.pop(name)
            self._last_number = page.number = self._last_number + 1
            self._numbers.append(page.number)
            self._names.append(name)
            names += self._children.get(name, ())

    def _remove(self, name: PageName) -> None:
        if name in self._reusable:
            self._disconnect(name)
        page = self._cut_off.pop(name)
        if page.parent is not None:
            siblings = self._children[page.parent]
            siblings.remove(name)
            if not siblings:
                del self._children[page.parent]

    def _disconnect(self, first: PageName) -> None:
        """Let a page and all that follow it be reusable no longer."""
        names = [first]
        while names:
            name = names.pop()
            page = self._cut_off[name] = self._reusable.pop(name)
            for listener in self._listeners:
                if page.number <= listener.told:
                    listener.gone.append(name)
            names += self._children.get(name, ())

    def _slice(self, told: int) -> tuple[list[PageName], int]:
        """Return the next pages after a number, and the number up to which that is all."""
        names, num_bytes = list[PageName](), 0
        for place in range(bisect_right(self._numbers, told), len(self._numbers)):
            if num_bytes >= self._slice_bytes:
                return names, self._numbers[place - 1]
            page = self._reusable.get(self._names[place])
            if page is not None and page.number == self._numbers[place]:
                names.append(self._names[place])
                num_bytes += len(page.packed)
        return names, self._last_number

    def _runs(self, names: Iterable[PageName]) -> Iterator[list[tuple[PageName, _Page]]]:
        """Cut pages into runs, each page of which follows the one before it."""
        run: list[tuple[PageName, _Page]] = []
        for name in names:
            page = self._reusable[name]
            if run and page.parent != run[-1][0]:
                yield run
                run = []
            run.append((name, page))
        if run:
            yield run


def _stored(run: list[tuple[PageName, _Page]]) -> BlockStored:
    """Return the event that tells of a run of pages."""
    _, first = run[0]
    packed = b"".join([page.packed for _, page in run])
    return BlockStored(
        [_hash(name) for name, _ in run],
        None if first.parent is None else _hash(first.parent),
        from_wire(packed, "page").tolist(),
        len(first.packed) // TOKEN_ID_BYTES,
        medium=MEDIUM,
        extra_keys=[(first.salt,), *[None] * (len(run) - 1)] if first.salt and first.parent is None else None,
    )


def _hash(name: PageName) -> int:
    return int.from_bytes(name[:HASH_BYTES], "big")
