"""The prefill worker's half of a hand-off, over all orders of events."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from capsules import capsule
from event_orders import explore

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import Attempt, AttemptKey, Generation, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.doors import CancelCopies, CopyStopped, ReceiverLost, RequestEnded, StartCopy, Unsent
from pdserve.kvtransfer.session import Commit, Grant, PagesLanded, Quiesced, Taken, Withdrawn, of_parts
from pdserve.prefill_worker.sender import (
    Command,
    Event,
    FellSilent,
    PagesReady,
    PrefillDone,
    ReleasePages,
    Sender,
    State,
)
from pdserve.protocol.page_tables import Pages
from pdserve.protocol.reports import Failure

PEER = Peer(WorkerId("d0"), Incarnation(1))
KEY = AttemptKey(RequestId(bytes(16)), Attempt(0))
CAPSULE = capsule(40, (0, 7))
CAPABILITY = b"c" * 16


def pages(*numbers: int) -> Pages:
    return tuple(PageId(number) for number in numbers)


def grant(first_page: int, *numbers: int) -> Grant:
    return Grant(first_page, pages(*numbers), tuple(Generation(1) for _ in numbers), CAPABILITY, 4.0)


def fed(*events: Event, num_parts: int = 1) -> tuple[Sender, list[Command]]:
    """Return a sender that has seen these events, and all that it answered."""
    sender = Sender(PEER, KEY, num_parts)
    return sender, [command for event in events for command in sender.handle(event)]


def test_pages_are_copied_as_they_become_final_and_committed_when_all_have_landed() -> None:
    granted = grant(0, 10, 11, 12)
    sender, commands = fed(PagesReady(pages(3)), granted)
    assert commands == [StartCopy(PEER, KEY, pages(3), pages(10))]
    assert sender.handle(PagesReady(pages(5, 4))) == (StartCopy(PEER, KEY, pages(5, 4), pages(11, 12)),)
    assert sender.handle(CopyStopped((1,))) == (PagesLanded((1,)),)
    assert sender.handle(PrefillDone(CAPSULE)) == ()
    commit = Commit(CAPABILITY, CAPSULE)
    assert sender.handle(CopyStopped((2, 3))) == (PagesLanded((2, 3)), commit)
    assert sender.handle(Taken()) == (ReleasePages(),)


def test_leading_pages_that_the_receiver_holds_are_not_copied() -> None:
    _, commands = fed(PagesReady(pages(3, 4)), PrefillDone(CAPSULE), grant(1, 10))
    assert commands == [StartCopy(PEER, KEY, pages(4), pages(10))]


def test_a_grant_of_fewer_pages_than_there_are_to_send_fails_the_transfer() -> None:
    sender, commands = fed(PagesReady(pages(3, 4)), PrefillDone(CAPSULE), grant(0, 10))
    assert [c.failure for c in commands if isinstance(c, Unsent)] == [Failure.TRANSFER_FAILED]
    assert sender.state is State.CLOSED


@pytest.mark.parametrize(
    ("first_page", "src", "dst"), [(0, (3, 4), (10, 11)), (1, (4,), (10,)), (2, (), ()), (9, (), ())]
)
def test_of_a_grant_of_more_pages_than_there_are_to_send_the_rest_is_left_alone(
    first_page: int, src: tuple[int, ...], dst: tuple[int, ...]
) -> None:
    granted = grant(first_page, 10, 11, 12)
    sender, commands = fed(PagesReady(pages(3, 4)), PrefillDone(CAPSULE), granted)
    if src:
        assert commands == [StartCopy(PEER, KEY, pages(*src), pages(*dst))]
        commands = [*sender.handle(CopyStopped((1,) * len(src)))]
    assert commands[-1] == Commit(CAPABILITY, CAPSULE)


COMMITTED = (PagesReady(pages(3)), PrefillDone(CAPSULE), grant(0, 8), CopyStopped((1,)))


@pytest.mark.parametrize(
    ("before", "event", "may_resume"),
    [
        ((), ReceiverLost(PEER, "cut"), True),
        (COMMITTED[:2], ReceiverLost(PEER, "cut"), True),
        (COMMITTED[:3], ReceiverLost(PEER, "cut"), True),
        (COMMITTED[:3], CopyStopped(None, "error"), True),
        (COMMITTED[:3], CopyStopped(None, "error", in_doubt=True), True),
        (COMMITTED[:3], FellSilent(9.0), True),
        (COMMITTED[:3], Withdrawn("no room"), True),
        (COMMITTED, Withdrawn("a digest differs"), True),
        (COMMITTED, ReceiverLost(PEER, "cut"), False),
    ],
)
def test_a_sequence_may_be_resumed_unless_its_receiver_may_go_on_with_it(
    before: Iterable[Event], event: Event, may_resume: bool
) -> None:
    sender, _ = fed(*before)
    (failed,) = [command for command in sender.handle(event) if isinstance(command, Unsent)]
    assert failed.may_resume is may_resume


def test_giving_up_mid_copy_waits_for_every_copy_to_stop() -> None:
    sender, _ = fed(grant(0, 8, 9), PagesReady(pages(3)), PagesReady(pages(4)))
    assert sender.handle(RequestEnded("deadline")) == (CancelCopies(PEER, KEY),)
    assert sender.handle(CopyStopped(None, "cut")) == ()
    assert sender.handle(CopyStopped((5,))) == (Quiesced(""), ReleasePages())


def test_a_failed_copy_fails_the_transfer_after_the_others_have_stopped() -> None:
    sender, _ = fed(grant(0, 8, 9), PagesReady(pages(3)), PagesReady(pages(4)))
    failed = Unsent(KEY, Failure.TRANSFER_FAILED, "disconnected")
    assert sender.handle(CopyStopped(None, "disconnected")) == (failed, CancelCopies(PEER, KEY))
    assert sender.handle(CopyStopped((5,))) == (Quiesced(""), ReleasePages())


def test_after_a_copy_that_ended_in_doubt_nothing_is_said_but_the_source_pages_are_released() -> None:
    sender, _ = fed(grant(0, 8, 9), PagesReady(pages(3)), PagesReady(pages(4)))
    failed = Unsent(KEY, Failure.TRANSFER_FAILED, "reset")
    assert sender.handle(CopyStopped(None, "reset", in_doubt=True)) == (failed, CancelCopies(PEER, KEY))
    assert sender.handle(CopyStopped((5,))) == (ReleasePages(),)
    assert sender.handle(Withdrawn("it failed")) == ()


def test_after_a_silence_longer_than_its_lease_a_sender_starts_no_more_copies() -> None:
    sender, _ = fed(grant(0, 8, 9), PagesReady(pages(3)))
    assert sender.handle(FellSilent(3.9)) == ()
    reason = "silent for 4.0 s under a lease of 4 s"
    assert sender.handle(FellSilent(4.0)) == (Unsent(KEY, Failure.PEER_LOST, reason), CancelCopies(PEER, KEY))
    assert sender.handle(PagesReady(pages(4))) == ()
    assert sender.handle(CopyStopped((5,))) == (Quiesced(""), ReleasePages())


def test_a_copy_has_landed_once_every_part_of_it_has() -> None:
    sender, _ = fed(grant(0, 8, 9), PagesReady(pages(3)), PagesReady(pages(4)), PrefillDone(CAPSULE), num_parts=2)
    assert sender.handle(CopyStopped((5,))) == ()
    assert sender.handle(CopyStopped((6,))) == (), "the first rank is ahead of the second"
    assert not sender.is_abreast
    assert sender.handle(CopyStopped((7,), part=1)) == (PagesLanded(of_parts([(5,), (7,)])),)
    landed = PagesLanded(of_parts([(6,), (8,)]))
    assert sender.handle(CopyStopped((8,), part=1)) == (landed, Commit(CAPABILITY, CAPSULE))
    assert sender.state is State.LANDED


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("in_doubt", [False, True])
def test_a_part_that_fails_fails_the_hand_off_at_once_and_cancels_the_others(failed: int, in_doubt: bool) -> None:
    sender, _ = fed(grant(0, 8, 9), PagesReady(pages(3)), PrefillDone(CAPSULE), num_parts=2)
    stopped = CopyStopped(None, "reset", in_doubt, part=failed)
    assert sender.handle(stopped) == (Unsent(KEY, Failure.TRANSFER_FAILED, "reset"), CancelCopies(PEER, KEY))
    assert sender.state is State.DRAINING, "the other part may still be under way"
    with pytest.raises(ProtocolError, match="never started"):
        sender.handle(stopped)
    said = () if in_doubt else (Quiesced("cancelled"),)
    assert sender.handle(CopyStopped(None, "cancelled", part=1 - failed)) == (*said, ReleasePages())


@pytest.mark.parametrize("part", [-1, 1])
def test_a_part_that_no_rank_has_is_refused(part: int) -> None:
    sender, _ = fed(grant(0, 8, 9), PagesReady(pages(3)))
    with pytest.raises(ProtocolError, match="never started"):
        sender.handle(CopyStopped((5,), part=part))


def test_digests_of_parts_add_in_64_bits_and_one_part_is_the_page() -> None:
    most = (1 << 64) - 1
    assert of_parts([(5, most)]) == (5, most)
    assert of_parts([(5, most), (6, most)]) == (11, most - 1)


EVENTS: tuple[Event, ...] = (
    PagesReady(pages(0)),
    PrefillDone(CAPSULE),
    grant(0, 8, 9),
    grant(1, 8),
    CopyStopped((1,)),
    CopyStopped(None, "failed"),
    CopyStopped(None, "cut", in_doubt=True),
    Taken(),
    Withdrawn("w"),
    RequestEnded("g"),
    ReceiverLost(PEER, "p"),
    FellSilent(4.0),
)
DEPTH = 6


@dataclass
class Seen:
    """What the world around a sender knows: what is under way, and what was said."""

    sender: Sender = field(default_factory=lambda: Sender(PEER, KEY))
    copying: tuple[int, ...] = (0,)  # copies under way, by part
    num_released: int = 0
    num_failed: int = 0
    committed: bool = False
    quiesced: bool = False
    in_doubt: bool = False

    @property
    def num_copying(self) -> int:
        return sum(self.copying)

    def fork(self) -> "Seen":
        other = copy.copy(self)
        other.sender = copy.copy(self.sender)
        return other

    def feed(self, event: Event) -> None:
        try:
            commands = self.sender.handle(event)
        except ProtocolError:
            return
        if isinstance(event, CopyStopped):
            self.copying = tuple(count - (part == event.part) for part, count in enumerate(self.copying))
            self.in_doubt |= event.in_doubt
        for command in commands:
            self.see(command)

    def see(self, command: Command) -> None:
        match command:
            case StartCopy(_, _, src, dst):
                assert len(src) == len(dst)
                assert not self.quiesced
                assert not self.committed
                assert self.num_released == 0
                self.copying = tuple(count + 1 for count in self.copying)
            case Commit():
                assert self.num_copying == 0
                assert not self.committed
                assert not self.quiesced
                self.committed = True
            case PagesLanded():
                assert not self.committed
                assert not self.quiesced
            case Quiesced():
                assert self.num_copying == 0
                assert not self.in_doubt
                self.quiesced = True
            case ReleasePages():
                assert self.num_copying == 0
                self.num_released += 1
                assert self.num_released == 1
            case Unsent(_, _, _, may_resume):
                self.num_failed += 1
                assert self.num_failed == 1
                assert may_resume or self.committed

    def wind_up(self) -> None:
        """However it stands, giving up and the end of its copies close it."""
        self.feed(RequestEnded("end"))
        for part, count in enumerate(self.copying):
            for _ in range(count):
                self.feed(CopyStopped((1,), part=part))
        assert self.sender.state is (State.IN_DOUBT if self.in_doubt else State.CLOSED)
        assert self.num_released == 1
        assert self.quiesced + self.in_doubt == 1 or self.committed


def may_come(seen: Seen) -> list[Event]:
    """A mover reports no copy that it was not given."""
    others = (replace(each, part=1) for each in EVENTS if isinstance(each, CopyStopped))
    return [
        event
        for event in (*EVENTS, *others)
        if not isinstance(event, CopyStopped) or any(seen.copying[event.part : event.part + 1])
    ]


@pytest.mark.parametrize("num_parts", [1, 2])
def test_no_order_of_events_releases_pages_twice_or_under_a_copy_or_lies_about_being_quiescent(num_parts: int) -> None:
    assert explore(Seen(Sender(PEER, KEY, num_parts), (0,) * num_parts), DEPTH - 1, may_come) > 30_000
