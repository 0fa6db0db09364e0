"""Bugs on purpose in what routers and receivers conclude from who attaches."""

from collections.abc import Iterator
from math import inf
from unittest.mock import patch

from breaking import Original, breaks, mutation, wrap

from pdserve.base.ids import Peer
from pdserve.base.processes import KnownProcesses
from pdserve.router.requests.commands import DropLink


@breaks(KnownProcesses, "refusal")
def let_processes_attach_in_any_order(original: Original, self: KnownProcesses, process: Peer) -> str:
    reason: str = original(self, process)
    return "" if reason.startswith("a later process") else reason


@breaks(KnownProcesses, "note_attached")
def take_a_process_with_a_successor_for_ended_though_it_was_heard(
    original: Original, self: KnownProcesses, process: Peer, started_s: float, now_s: float
) -> Peer | None:
    """Believe that the earlier process of a worker has ended, though it is attached, or was heard since."""
    before: Peer | None = original(self, process, inf, now_s)
    return before


@mutation
def take_whoever_attaches_for_the_successor() -> Iterator[object]:
    """Believe that the process which had a name before has ended, whichever started first, and tell nobody to end."""
    with (
        patch.object(DropLink, "is_dismissal", new=False),
        wrap(KnownProcesses, "refusal", let_processes_attach_in_any_order),
        wrap(KnownProcesses, "note_attached", take_a_process_with_a_successor_for_ended_though_it_was_heard) as patched,
    ):
        yield patched
