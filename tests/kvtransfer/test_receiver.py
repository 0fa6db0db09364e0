"""The decode worker's half of a hand-off, over all orders of events."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from capsules import capsule

from pdserve.errors import ProtocolError, Refusal
from pdserve.ids import Generation, PageId
from pdserve.kvtransfer.receiver import (
    Admit,
    CheckDigests,
    Command,
    Committed,
    DigestsChecked,
    Event,
    Failed,
    FreePages,
    GaveUp,
    LeaseLapsed,
    QuarantinePages,
    Receiver,
    SenderAttached,
    SenderGone,
    SenderLost,
    SenderQuiesced,
    SendGrant,
    SendTaken,
    SendWithdrawn,
    State,
)
from pdserve.kvtransfer.session import Commit, Grant
from pdserve.reports import Failure

GRANT = Grant(1, (PageId(8), PageId(9)), (Generation(1), Generation(4)), b"c" * 16, 4.0)
COMMIT = Commit.of(GRANT, (21, 22), capsule(40, (0, 7), (2, 8)))


def fed(*events: Event) -> tuple[Receiver, list[Command]]:
    """Return a receiver that has seen these events, and all that it answered."""
    receiver = Receiver(GRANT)
    return receiver, [command for event in events for command in receiver.handle(event)]


def test_pages_are_a_sequences_after_grant_commit_and_digests() -> None:
    receiver, commands = fed(SenderAttached())
    assert commands == [SendGrant(GRANT)]
    assert receiver.handle(Committed(COMMIT)) == (CheckDigests((21, 22)),)
    assert receiver.handle(DigestsChecked(None)) == (Admit(COMMIT.capsule), SendTaken())


def test_a_grant_that_is_given_up_is_quarantined_until_the_sender_has_quiesced() -> None:
    receiver, _ = fed(SenderAttached())
    assert receiver.handle(GaveUp("cancelled")) == (SendWithdrawn("cancelled"), QuarantinePages())
    assert receiver.handle(Committed(COMMIT)) == ()
    assert receiver.handle(SenderQuiesced()) == (FreePages(),)


def test_a_lost_stream_proves_nothing() -> None:
    receiver, commands = fed(SenderAttached(), SenderLost("cut"))
    assert commands[1:] == [Failed(Failure.PEER_LOST, "cut"), SendWithdrawn("cut"), QuarantinePages()]
    assert receiver.handle(SenderAttached()) == (SendWithdrawn("given up while the stream was down"),)
    assert receiver.handle(SenderGone()) == (FreePages(),)


def test_a_lapsed_lease_fails_the_attempt_and_quarantines_the_pages_until_proof() -> None:
    receiver, commands = fed(SenderAttached(), LeaseLapsed("silent"))
    assert commands[1:] == [Failed(Failure.LEASE_LAPSED, "silent"), SendWithdrawn("silent"), QuarantinePages()]
    assert receiver.handle(LeaseLapsed("still silent")) == ()
    assert receiver.handle(SenderAttached()) == (SendWithdrawn("given up while the stream was down"),)
    assert receiver.handle(SenderQuiesced()) == (FreePages(),)


def test_what_has_been_committed_needs_no_lease() -> None:
    receiver, _ = fed(SenderAttached(), Committed(COMMIT), LeaseLapsed("silent"))
    assert receiver.handle(DigestsChecked(None)) == (Admit(COMMIT.capsule), SendTaken())


def test_a_wrong_digest_fails_the_attempt_and_quarantines_the_pages() -> None:
    _, commands = fed(SenderAttached(), Committed(COMMIT), DigestsChecked(1))
    assert commands[2:4] == [
        Failed(Failure.DIGEST_MISMATCH, "digest of page 1 differs from the commit's"),
        SendWithdrawn("digest of page 1 differs from the commit's"),
    ]
    assert commands[4:] == [QuarantinePages()]


def test_pages_that_were_never_offered_are_free_at_once() -> None:
    for event in (GaveUp("g"), SenderLost("l"), LeaseLapsed("s"), SenderQuiesced(), SenderGone()):
        _, commands = fed(event)
        assert commands[-1] == FreePages()


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ((), Committed(COMMIT)),
        ((SenderAttached(), Committed(COMMIT)), Committed(COMMIT)),
        ((SenderAttached(),), Committed(replace(COMMIT, capability=b"x" * 16))),
        ((SenderAttached(),), Committed(replace(COMMIT, region=1))),
        ((SenderAttached(),), Committed(replace(COMMIT, pages=(PageId(8), PageId(7))))),
        ((SenderAttached(),), Committed(replace(COMMIT, generations=(Generation(1), Generation(3))))),
        ((SenderAttached(),), Committed(replace(COMMIT, digests=(21,)))),
    ],
)
def test_what_cannot_be_said_now_changes_nothing(before: Iterable[Event], event: Event) -> None:
    receiver, _ = fed(*before)
    state = vars(receiver).copy()
    with pytest.raises(ProtocolError):
        receiver.handle(event)
    assert vars(receiver) == state


@pytest.mark.parametrize(
    ("commit", "refusal"),
    [
        (replace(COMMIT, capability=b"x" * 16), Refusal.CAPABILITY),
        (replace(COMMIT, region=1), Refusal.REGION),
        (replace(COMMIT, pages=(PageId(8), PageId(7))), Refusal.PAGE),
        (replace(COMMIT, generations=(Generation(1), Generation(3))), Refusal.GENERATION),
    ],
)
def test_a_commit_for_anything_but_the_grant_is_refused_by_its_kind(commit: Commit, refusal: Refusal) -> None:
    receiver, _ = fed(SenderAttached())
    with pytest.raises(ProtocolError) as refused:
        receiver.handle(Committed(commit))
    assert refused.value.refusal is refusal
    assert receiver.handle(Committed(COMMIT)) == (CheckDigests((21, 22)),)


def test_a_capability_is_good_for_one_commit() -> None:
    receiver, _ = fed(SenderAttached(), Committed(COMMIT))
    for event in (Committed(COMMIT), DigestsChecked(None), Committed(COMMIT)):
        if isinstance(event, DigestsChecked):
            receiver.handle(event)
            continue
        with pytest.raises(ProtocolError) as refused:
            receiver.handle(event)
        assert refused.value.refusal is Refusal.ORDER


def test_without_digest_checks_a_commit_is_taken_at_its_word() -> None:
    receiver = Receiver(GRANT, checks_digests=False)
    receiver.handle(SenderAttached())
    assert receiver.handle(Committed(COMMIT)) == (Admit(COMMIT.capsule), SendTaken())
    assert receiver.state is State.COMMITTED


EVENTS: tuple[Event, ...] = (
    SenderAttached(),
    Committed(COMMIT),
    Committed(replace(COMMIT, capability=b"x" * 16)),
    DigestsChecked(None),
    DigestsChecked(0),
    GaveUp("g"),
    SenderQuiesced(),
    SenderLost("l"),
    LeaseLapsed("s"),
    SenderGone(),
)


@dataclass
class Seen:
    """What the world around a receiver knows. `proven`: no write to the pages can be outstanding."""

    receiver: Receiver = field(default_factory=lambda: Receiver(GRANT))
    proven: bool = True
    checking: bool = False
    num_ends: int = 0  # of the pages: freed, or a sequence's
    num_failed: int = 0

    def fork(self) -> "Seen":
        other = copy.copy(self)
        other.receiver = copy.copy(self.receiver)
        return other

    def feed(self, event: Event) -> None:
        try:
            commands = self.receiver.handle(event)
        except ProtocolError:
            return
        if isinstance(event, Committed | SenderQuiesced | SenderGone):
            self.proven = True
        for command in commands:
            self.see(command, event)

    def see(self, command: Command, event: Event) -> None:
        match command:
            case SendGrant():
                self.proven = False
            case CheckDigests():
                assert event == Committed(COMMIT)
                self.checking = True
            case Admit(capsule):
                assert event == DigestsChecked(None)
                assert self.checking
                assert capsule == COMMIT.capsule
                self.num_ends += 1
            case FreePages():
                assert self.proven
                self.num_ends += 1
            case QuarantinePages():
                assert self.num_ends == 0
            case Failed():
                self.num_failed += 1
                assert self.num_failed == 1
        assert self.num_ends <= 1

    def wind_up(self) -> None:
        """However it stands, giving up and the sender's end settle the pages."""
        self.feed(GaveUp("end"))
        self.feed(SenderGone())
        assert self.num_ends == 1
        assert self.receiver.state in (State.FREE, State.COMMITTED)


def explore(seen: Seen, depth: int) -> int:
    seen.fork().wind_up()
    if depth == 0:
        return 1
    tried = 0
    for event in EVENTS:
        if isinstance(event, DigestsChecked) and not seen.checking:
            continue  # a check that was not asked for is never reported
        after = seen.fork()
        after.feed(event)
        tried += explore(after, depth - 1)
    return tried


def test_no_order_of_events_gives_pages_away_twice_or_without_proof() -> None:
    assert explore(Seen(), 5) > 10_000
