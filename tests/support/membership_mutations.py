"""Bugs on purpose in what a router concludes from who attaches."""

from collections.abc import Iterator
from math import inf
from unittest.mock import patch

from breaking import Original, mutation, wrap

from pdserve.ids import Incarnation, WorkerId
from pdserve.router.desk import Close
from pdserve.router.membership import KnownProcesses


def in_any_order(original: Original, self: KnownProcesses, worker_id: WorkerId, incarnation: Incarnation) -> str:
    reason: str = original(self, worker_id, incarnation)
    return "" if reason.startswith("a later process") else reason


def whenever_heard(
    original: Original, self: KnownProcesses, worker_id: WorkerId, incarnation: Incarnation, started_s: float
) -> Incarnation | None:
    before: Incarnation | None = original(self, worker_id, incarnation, inf)
    return before


@mutation
def take_whoever_attaches_for_the_successor() -> Iterator[object]:
    """Believe that the process which had a name before has ended, whichever started first, and tell nobody to end."""
    silently = patch.object(Close, "is_dismissal", new=False)
    with (
        silently,
        wrap(KnownProcesses, "refusal", in_any_order),
        wrap(KnownProcesses, "note_attached", whenever_heard) as patched,
    ):
        yield patched


@mutation
def take_a_process_with_a_successor_for_ended_though_it_was_heard() -> Iterator[object]:
    with wrap(KnownProcesses, "note_attached", whenever_heard) as patched:
        yield patched


@mutation
def send_a_process_away_when_an_earlier_one_attaches() -> Iterator[object]:
    with wrap(KnownProcesses, "refusal", in_any_order) as patched:
        yield patched
