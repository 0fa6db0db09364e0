"""Bugs on purpose in the receiver's half of a hand-off."""

from collections.abc import Iterator
from unittest.mock import patch

from breaking import Original, mutation, wrap

from pdserve.decode_worker.granting import Arrival, Leases
from pdserve.decode_worker.incoming import Incoming
from pdserve.kvtransfer import receiver
from pdserve.kvtransfer.session import Commit, Quiesced, Taken, Withdrawn


@mutation
def free_instead_of_quarantine() -> Iterator[object]:
    """Give granted pages back at once when a hand-off is given up."""

    def quarantine(original: Original, self: receiver.Receiver, reason: str) -> tuple[receiver.Command, ...]:
        return (Withdrawn(reason), *self._free())

    with wrap(receiver.Receiver, "_quarantine", quarantine) as patched:
        yield patched


@mutation
def free_when_the_stream_is_lost() -> Iterator[object]:
    """Take the end of the control stream for the end of the sender."""

    def handle(original: Original, self: receiver.Receiver, event: receiver.Event) -> tuple[receiver.Command, ...]:
        return original(self, receiver.SenderGone() if isinstance(event, receiver.SenderLost) else event)

    with wrap(receiver.Receiver, "handle", handle) as patched:
        yield patched


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


@mutation
def free_when_the_lease_lapses() -> Iterator[object]:
    """Take a silent sender for one that has ended."""

    def handle(original: Original, self: receiver.Receiver, event: receiver.Event) -> tuple[receiver.Command, ...]:
        return original(self, receiver.SenderGone() if isinstance(event, receiver.LeaseLapsed) else event)

    with wrap(receiver.Receiver, "handle", handle) as patched:
        yield patched


@mutation
def let_leases_never_lapse() -> Iterator[object]:
    with wrap(Leases, "take_lapsed", lambda original, self, now_s: ()) as patched:
        yield patched


@mutation
def accept_any_capability() -> Iterator[object]:
    with patch.object(receiver.hmac, "compare_digest", lambda *_: True) as patched:
        yield patched


@mutation
def accept_any_number_of_digests() -> Iterator[object]:
    def landed(original: Original, self: receiver.Receiver, digests: tuple[int, ...]) -> tuple[receiver.Command, ...]:
        return original(self, digests[: len(self.grant.pages) - len(self._digests)])

    with wrap(receiver.Receiver, "_landed", landed) as patched:
        yield patched


@mutation
def skip_the_digest_check() -> Iterator[object]:
    with wrap(receiver.Receiver, "_checked", lambda original, self, mismatch: original(self, None)) as patched:
        yield patched


@mutation
def say_taken_twice() -> Iterator[object]:
    def checked(original: Original, self: receiver.Receiver, mismatch: int | None) -> tuple[receiver.Command, ...]:
        commands = original(self, mismatch)
        return (*commands, Taken()) if mismatch is None else commands

    with wrap(receiver.Receiver, "_checked", checked) as patched:
        yield patched


@mutation
def take_a_commit_after_giving_up() -> Iterator[object]:
    """Go on with a hand-off that was given up because its commit came after all."""

    def handle(original: Original, self: receiver.Receiver, event: receiver.Event) -> tuple[receiver.Command, ...]:
        if self.state is receiver.State.QUARANTINED and isinstance(event, Commit):
            self.state = receiver.State.GRANTED
        return original(self, event)

    with wrap(receiver.Receiver, "handle", handle) as patched:
        yield patched


@mutation
def keep_pages_that_have_not_landed() -> Iterator[object]:
    """Let all pages of a hand-off that has failed be found."""

    def free(original: Original, self: Incoming, arrival: Arrival, num_checked: int) -> None:
        original(self, arrival, len(arrival.receiver.grant.pages))

    with wrap(Incoming, "_free", free) as patched:
        yield patched


@mutation
def keep_pages_before_they_are_checked() -> Iterator[object]:
    """Let the pages of a hand-off that has failed be found as soon as its sender reports them."""

    def free(original: Original, self: Incoming, arrival: Arrival, num_checked: int) -> None:
        original(self, arrival, max(num_checked, len(arrival.receiver._digests) + arrival.receiver._num_checking))

    with wrap(Incoming, "_free", free) as patched:
        yield patched
