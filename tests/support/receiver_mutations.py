"""Bugs on purpose in the receiver's half of a hand-off."""

from collections.abc import Iterator
from unittest.mock import patch

from breaking import Original, breaks, mutation, wrap

from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.decode_worker import receiver
from pdserve.decode_worker.granting import Arrival, Leases
from pdserve.decode_worker.incoming import Incoming
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import Commit, Quiesced, Taken, Withdrawn

SOMEBODY = Peer(WorkerId("somebody"), Incarnation(1))


@breaks(receiver.Receiver, "_quarantine")
def free_instead_of_quarantine(
    original: Original, self: receiver.Receiver, reason: str
) -> tuple[receiver.Command, ...]:
    """Give granted pages back at once when a hand-off is given up."""
    return (Withdrawn(reason), *self._free())


@breaks(receiver.Receiver, "handle")
def free_when_the_stream_is_lost(
    original: Original, self: receiver.Receiver, event: receiver.Event
) -> tuple[receiver.Command, ...]:
    """Take the end of the control stream for the end of the sender."""
    return original(self, doors.PeerGone(event.peer) if isinstance(event, doors.SenderLost) else event)


@mutation
def free_quarantined_pages_after_a_time() -> Iterator[object]:
    """Believe that a second is enough for any write."""
    since: dict[int, float] = {}

    def tick(original: Original, self: Incoming, silent_s: float, now_s: float) -> list[object]:
        results = original(self, silent_s, now_s)
        for arrival in [a for a in self._arrivals.values() if a.is_quarantined]:
            if now_s - since.setdefault(id(arrival.receiver), now_s) > 1.0:
                results += self._advance(arrival, Quiesced("q"))
        return results

    with wrap(Incoming, "tick", tick) as patched:
        yield patched


@breaks(receiver.Receiver, "handle")
def free_when_the_lease_lapses(
    original: Original, self: receiver.Receiver, event: receiver.Event
) -> tuple[receiver.Command, ...]:
    """Take a silent sender for one that has ended."""
    return original(self, doors.PeerGone(SOMEBODY) if isinstance(event, receiver.LeaseLapsed) else event)


@breaks(Leases, "take_lapsed")
def let_leases_never_lapse(*_: object) -> tuple[()]:
    return ()


@mutation
def accept_any_capability() -> Iterator[object]:
    with patch.object(receiver.hmac, "compare_digest", lambda *_: True) as patched:
        yield patched


@breaks(receiver.Receiver, "_landed")
def accept_any_number_of_digests(
    original: Original, self: receiver.Receiver, digests: tuple[int, ...]
) -> tuple[receiver.Command, ...]:
    return original(self, digests[: len(self.grant.pages) - len(self._digests)])


@breaks(receiver.Receiver, "_checked")
def skip_the_digest_check(original: Original, self: receiver.Receiver, mismatch: int | None) -> object:
    return original(self, None)


@breaks(receiver.Receiver, "_checked")
def say_taken_twice(original: Original, self: receiver.Receiver, mismatch: int | None) -> tuple[receiver.Command, ...]:
    commands = original(self, mismatch)
    return (*commands, Taken()) if mismatch is None else commands


@breaks(receiver.Receiver, "handle")
def take_a_commit_after_giving_up(
    original: Original, self: receiver.Receiver, event: receiver.Event
) -> tuple[receiver.Command, ...]:
    """Go on with a hand-off that was given up because its commit came after all."""
    if self.state is receiver.State.QUARANTINED and isinstance(event, Commit):
        self.state = receiver.State.GRANTED
    return original(self, event)


@breaks(Incoming, "_free")
def keep_pages_that_have_not_landed(original: Original, self: Incoming, arrival: Arrival, num_checked: int) -> None:
    """Let all pages of a hand-off that has failed be found."""
    original(self, arrival, len(arrival.receiver.grant.pages))


@breaks(Incoming, "_free")
def keep_pages_before_they_are_checked(original: Original, self: Incoming, arrival: Arrival, num_checked: int) -> None:
    """Let the pages of a hand-off that has failed be found as soon as its sender reports them."""
    original(self, arrival, max(num_checked, len(arrival.receiver._digests) + arrival.receiver._num_checking))
