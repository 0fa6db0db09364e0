"""The decode worker's half of a hand-off, over all orders of events."""

import copy
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from capsules import capsule
from event_orders import explore

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import Attempt, AttemptKey, Generation, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.decode_worker.receiver import (
    Admit,
    Command,
    Event,
    FreePages,
    LeaseLapsed,
    QuarantinePages,
    Receiver,
    State,
)
from pdserve.kvtransfer.doors import (
    CheckDigests,
    DigestsChecked,
    NotAdmitted,
    PeerGone,
    RequestEnded,
    SenderAttached,
    SenderLost,
)
from pdserve.kvtransfer.session import Commit, Grant, PagesLanded, Quiesced, Taken, Withdrawn
from pdserve.protocol.paging import PageOrder, Paging
from pdserve.protocol.reports import Failure

PAGE_SIZE = 16
PEER = Peer(WorkerId("p0"), Incarnation(1))
KEY = AttemptKey(RequestId(bytes(16)), Attempt(0))
GRANT = Grant(1, (PageId(8), PageId(9)), (Generation(1), Generation(4)), b"c" * 16, 4.0)
LANDED = PagesLanded((21, 22))
COMMIT = Commit(GRANT.capability, capsule(40, (0, 7), (2, 8)))
SHORTER = Commit(GRANT.capability, capsule(32, (0, 7)))


def fed(*events: Event) -> tuple[Receiver, list[Command]]:
    """Return a receiver that has seen these events, and all that it answered."""
    receiver = Receiver(KEY, GRANT, PageOrder(Paging.of(PAGE_SIZE), 0))
    return receiver, [command for event in events for command in receiver.handle(event)]


def test_pages_are_a_sequences_after_grant_commit_and_digests() -> None:
    receiver, commands = fed(SenderAttached(PEER))
    assert commands == [GRANT]
    assert receiver.handle(PagesLanded((21,))) == (CheckDigests(KEY, GRANT.pages[:1], (21,)),)
    assert receiver.handle(PagesLanded((22,))) == ()
    assert receiver.handle(COMMIT) == ()
    assert receiver.handle(DigestsChecked(KEY, None)) == (CheckDigests(KEY, GRANT.pages[1:], (22,)),)
    assert receiver.handle(DigestsChecked(KEY, None)) == (Admit(COMMIT.capsule, 2), Taken())


def test_what_was_checked_before_the_commit_is_not_checked_again() -> None:
    receiver, _ = fed(SenderAttached(PEER), LANDED, DigestsChecked(KEY, None))
    assert receiver.handle(COMMIT) == (Admit(COMMIT.capsule, 2), Taken())


def test_a_commit_may_need_fewer_pages_than_were_granted() -> None:
    receiver, _ = fed(SenderAttached(PEER), PagesLanded((21,)), DigestsChecked(KEY, None))
    assert receiver.handle(SHORTER) == (Admit(SHORTER.capsule, 1), Taken())
    receiver, _ = fed(SenderAttached(PEER))
    nothing = Commit(GRANT.capability, capsule(7))
    assert receiver.handle(nothing) == (Admit(nothing.capsule, 0), Taken())


def test_a_grant_that_is_given_up_is_quarantined_until_the_sender_has_quiesced() -> None:
    receiver, _ = fed(SenderAttached(PEER))
    assert receiver.handle(RequestEnded("cancelled")) == (Withdrawn("cancelled"), QuarantinePages())
    assert receiver.handle(COMMIT) == ()
    assert receiver.handle(Quiesced("q")) == (FreePages(0),)


def test_a_hand_off_that_its_sender_gives_up_has_failed() -> None:
    receiver, _ = fed(SenderAttached(PEER))
    failed = NotAdmitted(KEY, Failure.SENDER_GAVE_UP, "no copy")
    assert receiver.handle(Quiesced("no copy")) == (failed, FreePages(0))


CHECKED = (PagesLanded((21,)), DigestsChecked(KEY, None))


@pytest.mark.parametrize(
    ("events", "num_checked"),
    [
        ((PagesLanded((21,)), Quiesced("q")), 0),
        ((*CHECKED, Quiesced("q")), 1),
        ((*CHECKED, PeerGone(PEER)), 1),
        ((*CHECKED, PagesLanded((22,)), PeerGone(PEER)), 1),
        ((LANDED, DigestsChecked(KEY, None), PeerGone(PEER)), 2),
        ((LANDED, DigestsChecked(KEY, 1), Quiesced("q")), 1),
        ((*CHECKED, PagesLanded((22,)), DigestsChecked(KEY, 0), Quiesced("q")), 1),
        ((LANDED, SenderLost(PEER, "cut"), DigestsChecked(KEY, None), PeerGone(PEER)), 2),
        ((LANDED, SenderLost(PEER, "cut"), DigestsChecked(KEY, 1), PeerGone(PEER)), 1),
        ((PagesLanded((21,)), PagesLanded((22,)), RequestEnded("g"), DigestsChecked(KEY, None), Quiesced("q")), 1),
        ((*CHECKED, RequestEnded("g"), PagesLanded((22,)), Quiesced("q")), 1),
        ((LANDED, COMMIT, RequestEnded("g")), 0),
        ((*CHECKED, PagesLanded((22,)), COMMIT, RequestEnded("g")), 1),
    ],
)
def test_of_a_failed_hand_off_it_is_known_how_many_leading_pages_are_whole(
    events: tuple[Event, ...], num_checked: int
) -> None:
    _, commands = fed(SenderAttached(PEER), *events)
    assert commands[-1] == FreePages(num_checked)


def test_a_check_under_way_when_a_hand_off_is_given_up_is_followed_by_those_that_wait() -> None:
    receiver, _ = fed(SenderAttached(PEER), PagesLanded((21,)), PagesLanded((22,)), RequestEnded("g"))
    assert receiver.handle(DigestsChecked(KEY, None)) == (CheckDigests(KEY, GRANT.pages[1:], (22,)),)
    assert receiver.handle(DigestsChecked(KEY, None)) == ()
    assert receiver.handle(PeerGone(PEER)) == (FreePages(2),)


def test_a_lost_stream_proves_nothing() -> None:
    receiver, commands = fed(SenderAttached(PEER), SenderLost(PEER, "cut"))
    assert commands[1:] == [NotAdmitted(KEY, Failure.PEER_LOST, "cut"), Withdrawn("cut"), QuarantinePages()]
    assert receiver.handle(SenderAttached(PEER)) == (Withdrawn("given up while the stream was down"),)
    assert receiver.handle(PeerGone(PEER)) == (FreePages(0),)


def test_a_lapsed_lease_fails_the_attempt_and_quarantines_the_pages_until_proof() -> None:
    receiver, commands = fed(SenderAttached(PEER), LeaseLapsed("silent"))
    assert commands[1:] == [NotAdmitted(KEY, Failure.LEASE_LAPSED, "silent"), Withdrawn("silent"), QuarantinePages()]
    assert receiver.handle(LeaseLapsed("still silent")) == ()
    assert receiver.handle(SenderAttached(PEER)) == (Withdrawn("given up while the stream was down"),)
    assert receiver.handle(Quiesced("q")) == (FreePages(0),)


def test_what_has_been_committed_needs_no_lease() -> None:
    receiver, _ = fed(SenderAttached(PEER), LANDED, COMMIT, LeaseLapsed("silent"))
    assert receiver.handle(DigestsChecked(KEY, None)) == (Admit(COMMIT.capsule, 2), Taken())


def test_a_wrong_digest_fails_the_attempt_and_quarantines_the_pages() -> None:
    reason = "digest of page 1 differs from the sender's"
    wrong = [NotAdmitted(KEY, Failure.DIGEST_MISMATCH, reason), Withdrawn(reason), QuarantinePages()]
    for before in ((LANDED,), (LANDED, COMMIT)):
        _, commands = fed(SenderAttached(PEER), *before, DigestsChecked(KEY, 1))
        assert commands[2:] == wrong
    _, commands = fed(SenderAttached(PEER), *CHECKED, PagesLanded((22,)), DigestsChecked(KEY, 0))
    assert commands[3:] == wrong


def test_pages_that_were_never_offered_are_free_at_once() -> None:
    for event in (RequestEnded("g"), SenderLost(PEER, "l"), LeaseLapsed("s"), Quiesced("q"), PeerGone(PEER)):
        _, commands = fed(event)
        assert commands[-1] == FreePages(0)


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ((), COMMIT),
        ((), LANDED),
        ((SenderAttached(PEER), LANDED, COMMIT), COMMIT),
        ((SenderAttached(PEER), LANDED, COMMIT), LANDED),
        ((SenderAttached(PEER), LANDED), PagesLanded((23,))),
        ((SenderAttached(PEER),), COMMIT),
        ((SenderAttached(PEER), PagesLanded((21,))), COMMIT),
        ((SenderAttached(PEER), LANDED), SHORTER),
        ((SenderAttached(PEER), LANDED), replace(COMMIT, capability=b"x" * 16)),
    ],
)
def test_what_cannot_be_said_now_changes_nothing(before: Iterable[Event], event: Event) -> None:
    receiver, _ = fed(*before)
    state = vars(receiver).copy()
    with pytest.raises(ProtocolError):
        receiver.handle(event)
    assert vars(receiver) == state


def test_a_commit_for_anything_but_the_grant_is_refused_by_its_kind() -> None:
    receiver, _ = fed(SenderAttached(PEER), LANDED)
    with pytest.raises(ProtocolError) as refused:
        receiver.handle(replace(COMMIT, capability=b"x" * 16))
    assert refused.value.refusal is PeerFault.CAPABILITY
    assert receiver.handle(COMMIT) == ()
    assert receiver.state is State.LANDING


def test_a_forged_commit_changes_nothing() -> None:
    receiver, _ = fed(SenderAttached(PEER), LANDED)
    with suppress(ProtocolError):
        receiver.handle(replace(COMMIT, capability=b"x" * 16))
    assert receiver.state is State.GRANTED


def test_a_capability_is_good_for_one_commit() -> None:
    receiver, _ = fed(SenderAttached(PEER), LANDED, COMMIT)
    for event in (COMMIT, DigestsChecked(KEY, None), COMMIT):
        if isinstance(event, DigestsChecked):
            receiver.handle(event)
            continue
        with pytest.raises(ProtocolError) as refused:
            receiver.handle(event)
        assert refused.value.refusal is PeerFault.ORDER


def test_without_digest_checks_a_commit_is_taken_at_its_word() -> None:
    receiver = Receiver(KEY, GRANT, PageOrder(Paging.of(PAGE_SIZE), 0), checks_digests=False)
    receiver.handle(SenderAttached(PEER))
    assert receiver.handle(LANDED) == ()
    assert receiver.handle(COMMIT) == (Admit(COMMIT.capsule, 2), Taken())
    assert receiver.state is State.COMMITTED


def test_pages_that_were_not_checked_are_not_known_to_be_whole() -> None:
    receiver = Receiver(KEY, GRANT, PageOrder(Paging.of(PAGE_SIZE), 0), checks_digests=False)
    assert [receiver.handle(event) for event in (SenderAttached(PEER), LANDED, PeerGone(PEER))][-1][-1] == FreePages(0)


EVENTS: tuple[Event, ...] = (
    SenderAttached(PEER),
    PagesLanded((21,)),
    PagesLanded((22,)),
    COMMIT,
    SHORTER,
    replace(COMMIT, capability=b"x" * 16),
    DigestsChecked(KEY, None),
    DigestsChecked(KEY, 0),
    RequestEnded("g"),
    Quiesced("q"),
    SenderLost(PEER, "l"),
    LeaseLapsed("s"),
    PeerGone(PEER),
)


@dataclass
class Seen:
    """What the world around a receiver knows. `proven`: no write to the pages can be outstanding."""

    receiver: Receiver = field(default_factory=lambda: Receiver(KEY, GRANT, PageOrder(Paging.of(PAGE_SIZE), 0)))
    proven: bool = True
    num_landed: int = 0
    num_checked: int = 0
    num_checking: int = 0
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
        if isinstance(event, Commit | Quiesced | PeerGone):
            self.proven = True
        if isinstance(event, DigestsChecked):
            self.num_checked += self.num_checking if event.mismatch is None else event.mismatch
            self.num_checking = 0
        self.num_landed += isinstance(event, PagesLanded)
        for command in commands:
            self.see(command, event)

    def see(self, command: Command, event: Event) -> None:
        match command:
            case Grant():
                self.proven = False
            case CheckDigests(_, pages, digests):
                assert self.num_checking == 0
                assert pages == GRANT.pages[self.num_checked : self.num_checked + len(digests)]
                self.num_checking = len(digests)
            case Admit(capsule, num_pages):
                assert capsule in (COMMIT.capsule, SHORTER.capsule)
                assert num_pages == self.num_checked == self.num_landed
                self.num_ends += 1
            case FreePages(num_checked):
                assert self.proven
                assert num_checked <= self.num_checked
                self.num_ends += 1
            case QuarantinePages():
                assert self.num_ends == 0
            case NotAdmitted():
                self.num_failed += 1
                assert self.num_failed == 1
        assert self.num_ends <= 1

    def wind_up(self) -> None:
        """However it stands, giving up and the sender's end settle the pages."""
        self.feed(RequestEnded("end"))
        self.feed(PeerGone(PEER))
        assert self.num_ends == 1
        assert self.receiver.state in (State.FREE, State.COMMITTED)


def may_come(seen: Seen) -> list[Event]:
    """A check that was not asked for is never reported."""
    return [event for event in EVENTS if seen.num_checking or not isinstance(event, DigestsChecked)]


def test_no_order_of_events_gives_pages_away_twice_or_without_proof() -> None:
    assert explore(Seen(), 5, may_come) > 10_000


def test_no_order_of_events_after_a_commit_gives_pages_away_twice_or_without_proof() -> None:
    seen = Seen()
    for event in (SenderAttached(PEER), PagesLanded((21,)), PagesLanded((22,)), COMMIT):
        seen.feed(event)
    assert explore(seen, 4, may_come) > 1_000
