"""Bugs on purpose in what a router concludes from who attaches."""

from collections.abc import Iterator
from math import inf
from unittest.mock import patch

from breaking import Original, breaks, mutation, wrap

from pdserve.ids import Incarnation, WorkerId
from pdserve.router.desk import Close
from pdserve.router.membership import KnownProcesses


@breaks(KnownProcesses, "refusal")
def send_a_process_away_when_an_earlier_one_attaches(
    original: Original, self: KnownProcesses, worker_id: WorkerId, incarnation: Incarnation
) -> str:
    reason: str = original(self, worker_id, incarnation)
    return "" if reason.startswith("a later process") else reason


@breaks(KnownProcesses, "note_attached")
def take_a_process_with_a_successor_for_ended_though_it_was_heard(
    original: Original, self: KnownProcesses, worker_id: WorkerId, incarnation: Incarnation, started_s: float
) -> Incarnation | None:
    before: Incarnation | None = original(self, worker_id, incarnation, inf)
    return before


@mutation
def take_whoever_attaches_for_the_successor() -> Iterator[object]:
    """Believe that the process which had a name before has ended, whichever started first, and tell nobody to end."""
    with (
        patch.object(Close, "is_dismissal", new=False),
        wrap(KnownProcesses, "refusal", send_a_process_away_when_an_earlier_one_attaches),
        wrap(KnownProcesses, "note_attached", take_a_process_with_a_successor_for_ended_though_it_was_heard) as patched,
    ):
        yield patched
