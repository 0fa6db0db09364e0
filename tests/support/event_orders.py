"""All orders of events, up to a length."""

from collections.abc import Callable, Iterable
from typing import Protocol, Self, TypeVar

E = TypeVar("E")


class Forks(Protocol[E]):
    """What events change, with all that is known of it."""

    def fork(self) -> Self: ...
    def feed(self, event: E) -> None: ...
    def wind_up(self) -> None: ...


F = TypeVar("F", bound=Forks)


def explore(seen: F, depth: int, events: Callable[[F], Iterable[E]]) -> int:
    """Feed it all orders of events that may come, and wind it up behind each; return how many orders were tried."""
    seen.fork().wind_up()
    if depth == 0:
        return 1
    tried = 0
    for event in events(seen):
        after = seen.fork()
        after.feed(event)
        tried += explore(after, depth - 1, events)
    return tried
