"""What changed in a worker's prefix cache: full pages that can be reused, and pages that cannot be any longer. Pure.

Invariant: replaying a journal from its start gives the pages that are indexed now: each is stored once before it is
removed, and removed before it is stored again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.prefix import PageName


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages of one prefix, one after the other, can be reused from now on."""

    parent: PageName | None  # the page before the first one; None: it begins a sequence
    names: tuple[PageName, ...]
    token_ids: tuple[int, ...]  # of these pages
    page_size: int
    salt: str  # pages are shared only between sequences with equal ones


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """These pages are about to be overwritten."""

    names: tuple[PageName, ...]


CacheEvent = PagesStored | PagesRemoved


class Journal:
    """Changes that nobody has taken yet. Whoever lets a cache write one empties it after each step."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def stored(
        self, names: Sequence[PageName], run: range, token_ids: Sequence[int], page_size: int, salt: str
    ) -> None:
        """Note that the pages `run` of a sequence with these names and tokens are indexed."""
        if not run:
            return
        parent = names[run.start - 1] if run.start else None
        tokens = tuple(token_ids[run.start * page_size : run.stop * page_size])
        self._events.append(PagesStored(parent, tuple(names[run.start : run.stop]), tokens, page_size, salt))

    def removed(self, names: Sequence[PageName]) -> None:
        if names:
            self._events.append(PagesRemoved(tuple(names)))

    def take(self) -> tuple[CacheEvent, ...]:
        """Return what changed since the last time, in order."""
        events = tuple(self._events)
        self._events.clear()
        return events
