"""Which processes are let in, and which are taken for ended, whatever the order in which they come and go."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Refusal
from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvlayout import KvLayout
from pdserve.kvtransfer.doors import Forget, PeerGone, SenderAlive, SenderAttached, SenderLost, SenderMessage
from pdserve.kvtransfer.greeting import Hello, Introduction
from pdserve.kvtransfer.receiver import Quiesced
from pdserve.kvtransfer.roster import (
    Alive,
    Close,
    Command,
    Ended,
    Greeted,
    Malformed,
    Received,
    Refuse,
    Roster,
    StreamId,
    Welcome,
)
from pdserve.kvtransfer.session import HandoffKey, Peer

ME = Introduction(Peer(WorkerId("d0"), Incarnation(100)), KvLayout("w", 2, 2, 4, 4, "float32"))
KEY = HandoffKey(RequestId(bytes(16)), Attempt(0))


def process(incarnation: int) -> Peer:
    return Peer(WorkerId("p0"), Incarnation(incarnation))


EARLY, LATE = process(1), process(2)


class Door:
    """A roster, and the streams that were opened to it."""

    def __init__(self) -> None:
        self.roster = Roster(ME, "loopback")
        self.num_streams = 0

    def greet(self, peer: Peer, now_s: float = 0.0, age_s: float = 0.0) -> tuple[Command, ...]:
        """Open the next stream; they are numbered from 1."""
        self.num_streams += 1
        hello = Hello(Introduction(peer, ME.layout), "loopback", ME.peer.incarnation, age_s)
        return self.roster.handle(Greeted(StreamId(self.num_streams), hello), now_s)


def test_messages_of_an_attached_process_are_reported_in_its_name() -> None:
    door = Door()
    assert door.greet(EARLY) == (Welcome(StreamId(1)), SenderAttached(EARLY))
    assert door.roster.handle(Alive(StreamId(1)), 1.0) == (SenderAlive(EARLY),)
    message = Received(StreamId(1), KEY, Quiesced("q"))
    assert door.roster.handle(message, 1.0) == (SenderMessage(EARLY, KEY, Quiesced("q")),)
    assert door.roster.handle(Ended(StreamId(1), "reset"), 2.0) == (SenderLost(EARLY, "reset"),)
    assert door.roster.handle(message, 3.0) == ()


def test_a_process_that_attaches_anew_takes_the_place_of_its_old_stream() -> None:
    door = Door()
    door.greet(EARLY)
    commands = door.greet(EARLY)
    assert commands[:2] == (Close(StreamId(1), "it attached anew"), SenderLost(EARLY, "it attached anew"))
    assert door.roster.handle(Ended(StreamId(1), "late"), 1.0) == ()
    assert door.roster.attached == (EARLY,)


def test_a_process_not_received_from_since_its_successor_started_has_ended() -> None:
    door = Door()
    door.greet(EARLY, now_s=0.0)
    door.roster.handle(Ended(StreamId(1), "reset"), 1.0)
    assert door.greet(LATE, now_s=9.0, age_s=2.0) == (PeerGone(EARLY), Welcome(StreamId(2)), SenderAttached(LATE))


def test_a_process_received_from_since_its_successor_started_lives() -> None:
    door = Door()
    door.greet(EARLY, now_s=0.0)
    door.roster.handle(Alive(StreamId(1)), 8.0)
    door.roster.handle(Ended(StreamId(1), "reset"), 8.0)
    assert PeerGone(EARLY) not in door.greet(LATE, now_s=9.0, age_s=2.0)


def test_a_process_lives_of_which_something_malformed_was_received_since_its_successor_started() -> None:
    door = Door()
    door.greet(EARLY, now_s=0.0)
    assert door.roster.handle(Malformed(StreamId(1)), 8.0) == ()
    door.roster.handle(Ended(StreamId(1), "reset"), 8.0)
    assert PeerGone(EARLY) not in door.greet(LATE, now_s=9.0, age_s=2.0)


def test_an_attached_process_lives_whoever_follows_it_and_is_cut_off() -> None:
    door = Door()
    door.greet(EARLY, now_s=0.0)
    commands = door.greet(LATE, now_s=9.0, age_s=2.0)
    assert commands[:2] == (Close(StreamId(1), "it has a successor"), SenderLost(EARLY, "it has a successor"))
    assert PeerGone(EARLY) not in commands


def test_a_process_known_to_have_ended_is_cut_off_and_attaches_no_more() -> None:
    door = Door()
    door.greet(EARLY)
    assert door.roster.handle(Forget(EARLY), 1.0)[1] == SenderLost(EARLY, "its process has ended")
    assert is_refused(door.greet(EARLY))


def test_an_earlier_process_is_refused_after_a_later_one() -> None:
    door = Door()
    door.greet(LATE)
    assert is_refused(door.greet(EARLY))


def is_refused(commands: Iterable[Command]) -> bool:
    (refuse,) = commands
    return isinstance(refuse, Refuse) and refuse.error.refusal is Refusal.INCARNATION


@dataclass
class Model:
    """What may be reported, by what was seen at the door."""

    door: Door = field(default_factory=Door)
    streams: dict[Peer, StreamId] = field(default_factory=dict)
    spoke_s: dict[Peer, float] = field(default_factory=dict)
    over: set[Peer] = field(default_factory=set)

    def step(self, what: str, peer: Peer, now_s: float, age_s: float) -> None:
        match what:
            case "greet":
                self.take_in(self.door.greet(peer, now_s, age_s), peer, now_s, age_s)
            case "forget":
                self.over.add(peer)
                self.take_in(self.door.roster.handle(Forget(peer), now_s), peer, now_s, age_s)
            case _ if peer in self.streams:
                event = Alive(self.streams[peer]) if what == "alive" else Ended(self.streams[peer], "")
                self.take_in(self.door.roster.handle(event, now_s), peer, now_s, age_s)
        assert set(self.door.roster.attached) == set(self.streams)

    def take_in(self, commands: Iterable[Command], peer: Peer, now_s: float, age_s: float) -> None:
        attached_before = set(self.streams)
        for command in commands:
            match command:
                case SenderAttached():
                    assert command.peer not in self.over
                    self.streams[peer], self.spoke_s[peer] = StreamId(self.door.num_streams), now_s
                case SenderLost():
                    del self.streams[command.peer]
                case SenderAlive():
                    self.spoke_s[peer] = now_s
                case PeerGone():
                    assert command.peer.incarnation < peer.incarnation
                    assert command.peer not in attached_before
                    assert self.spoke_s[command.peer] <= now_s - age_s
                    self.over.add(command.peer)


STEPS = st.tuples(st.sampled_from(["greet", "alive", "end", "forget"]), st.integers(1, 3), st.floats(0.0, 5.0))


@given(st.lists(STEPS, max_size=20))
def test_only_processes_without_a_stream_and_without_a_sign_of_life_are_taken_for_ended(
    steps: list[tuple[str, int, float]],
) -> None:
    model = Model()
    for number, (what, incarnation, age_s) in enumerate(steps):
        model.step(what, process(incarnation), 10.0 + number, age_s)
