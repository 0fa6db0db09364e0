"""Which processes are let in, and which are taken for ended, whatever the order in which they come and go."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.kvtransfer.doors import PeerGone, SenderAttached, SenderLost
from pdserve.kvtransfer.roster import Close, Command, Roster, StreamId
from pdserve.kvtransfer.session import Hello, Introduction
from pdserve.protocol.kvlayout import KvLayout

ME = Introduction(Peer(WorkerId("d0"), Incarnation(100)), KvLayout("w", 2, 2, 4, 4, "float32"))


def process(incarnation: int) -> Peer:
    return Peer(WorkerId("p0"), Incarnation(incarnation))


EARLY, LATE = process(1), process(2)


class Door:
    """A roster, and the streams that were opened to it."""

    def __init__(self) -> None:
        self.roster = Roster(ME, "loopback")
        self.num_streams = 0

    def greet(self, peer: Peer, now_s: float = 0.0, age_s: float = 0.0) -> list[Command]:
        """Open the next stream; they are numbered from 1."""
        self.num_streams += 1
        hello = Hello(Introduction(peer, ME.layout), "loopback", ME.peer.incarnation, age_s)
        return self.roster.attach(StreamId(self.num_streams), hello, now_s)

    def is_refused(self, peer: Peer) -> bool:
        with pytest.raises(ProtocolError) as refused:
            self.greet(peer)
        return refused.value.refusal is PeerFault.INCARNATION


def test_messages_are_those_of_the_process_that_is_attached_on_their_stream() -> None:
    door = Door()
    assert door.roster.receive(StreamId(1), 0.0) is None
    assert door.greet(EARLY) == [SenderAttached(EARLY)]
    assert door.roster.receive(StreamId(1), 1.0) == EARLY
    assert door.roster.end(StreamId(1), "reset") == [SenderLost(EARLY, "reset")]
    assert door.roster.receive(StreamId(1), 3.0) is None


def test_a_process_that_attaches_anew_takes_the_place_of_its_old_stream() -> None:
    door = Door()
    door.greet(EARLY)
    commands = door.greet(EARLY)
    assert commands[:2] == [Close(StreamId(1), "it attached anew"), SenderLost(EARLY, "it attached anew")]
    assert door.roster.end(StreamId(1), "late") == []
    assert door.roster.attached == (EARLY,)


def test_a_process_not_received_from_since_its_successor_started_has_ended() -> None:
    door = Door()
    door.greet(EARLY, now_s=0.0)
    door.roster.end(StreamId(1), "reset")
    assert door.greet(LATE, now_s=9.0, age_s=2.0) == [PeerGone(EARLY), SenderAttached(LATE)]


def test_a_process_received_from_since_its_successor_started_lives() -> None:
    door = Door()
    door.greet(EARLY, now_s=0.0)
    door.roster.receive(StreamId(1), 8.0)
    door.roster.end(StreamId(1), "reset")
    assert PeerGone(EARLY) not in door.greet(LATE, now_s=9.0, age_s=2.0)


def test_an_attached_process_lives_whoever_follows_it_and_is_cut_off() -> None:
    door = Door()
    door.greet(EARLY, now_s=0.0)
    commands = door.greet(LATE, now_s=9.0, age_s=2.0)
    assert commands[:2] == [Close(StreamId(1), "it has a successor"), SenderLost(EARLY, "it has a successor")]
    assert PeerGone(EARLY) not in commands


def test_a_process_known_to_have_ended_is_cut_off_and_attaches_no_more() -> None:
    door = Door()
    door.greet(EARLY)
    assert door.roster.forget(EARLY)[1] == SenderLost(EARLY, "its process has ended")
    assert door.is_refused(EARLY)


def test_an_earlier_process_is_refused_after_a_later_one() -> None:
    door = Door()
    door.greet(LATE)
    assert door.is_refused(EARLY)


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
                with suppress(ProtocolError):
                    self.take_in(self.door.greet(peer, now_s, age_s), peer, now_s, age_s)
            case "forget":
                self.over.add(peer)
                self.take_in(self.door.roster.forget(peer), peer, now_s, age_s)
            case "alive" if peer in self.streams:
                assert self.door.roster.receive(self.streams[peer], now_s) == peer
                self.spoke_s[peer] = now_s
            case "end" if peer in self.streams:
                self.take_in(self.door.roster.end(self.streams[peer], ""), peer, now_s, age_s)
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
