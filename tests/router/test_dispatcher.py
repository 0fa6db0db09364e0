"""What reaches the core, in which order, and who receives what it says."""

import asyncio
from dataclasses import dataclass, field

import pytest

from pdserve.base.clock import VirtualClock
from pdserve.base.errors import InvariantError, PeerFault
from pdserve.base.ids import Attempt, RequestId
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.refusal import Cause, Refused
from pdserve.router.dispatcher import Command, Dispatcher, Rang, Send, SetAlarm
from pdserve.router.requests.commands import CancelAttempt, Deliver, DropLink, End, Finished, Warn
from pdserve.router.requests.commands import Command as CoreCommand
from pdserve.router.requests.events import ClientGone, DrainAsked, Event, LinkId, LinkLost, StopStringFound, Tick
from pdserve.router.shell import Shell

NAME = RequestId(bytes(16))
STOPPED = StopStringFound(NAME, 0)


@dataclass
class ScriptedCore:
    """Says what the test has prepared for an event."""

    script: dict[Event, list[CoreCommand]] = field(default_factory=dict)
    handled: list[Event] = field(default_factory=list)
    due_s: float | None = None

    def handle(self, event: Event, now_s: float) -> list[CoreCommand]:
        self.handled.append(event)
        return self.script.get(event, [])

    def next_wakeup_s(self) -> float | None:
        return self.due_s


@dataclass
class Listener:
    """Finds a stop string in the first token."""

    received: list[object] = field(default_factory=list)

    def deliver(self, command: Deliver) -> StopStringFound:
        self.received.append(command)
        return STOPPED

    def end(self, outcome: Finished | Refused) -> None:
        self.received.append(outcome)


class Office:
    """A dispatcher with one link and one listener."""

    def __init__(self) -> None:
        self.core = ScriptedCore()
        self.dispatcher: Dispatcher[Listener] = Dispatcher(self.core)
        self.link = self.dispatcher.open_link()
        self.listener = self.dispatcher.answers[NAME] = Listener()

    def handle(self, event: Event | Rang) -> list[Command]:
        return list(self.dispatcher.handle(event, 0.0))


DRAIN, TICK = DrainAsked(LinkId(1)), Tick()
DELIVER = Deliver(NAME, 0, [7], [], 0)
ENDED = Refused(Cause.CANCELLED, "its client has left")


def test_an_event_that_comes_while_another_is_handled_waits_for_all_its_commands() -> None:
    office = Office()
    office.core.script = {TICK: [Warn("one"), Warn("two")], DRAIN: [Warn("three")]}
    done = []
    for command in office.dispatcher.handle(TICK, 0.0):
        done.append(command)
        if len(done) == 1:
            assert list(office.dispatcher.handle(DRAIN, 0.0)) == []
    assert done == [Warn("one"), Warn("two"), Warn("three")]


def test_what_an_answer_finds_in_its_tokens_is_handled_after_the_event_that_brought_them() -> None:
    office = Office()
    office.core.script = {TICK: [DELIVER, End(NAME, ENDED)]}
    office.handle(TICK)
    assert office.listener.received == [DELIVER, ENDED]
    assert office.core.handled == [TICK, STOPPED]


def test_an_answer_ends_once() -> None:
    office = Office()
    office.core.script = {TICK: [End(NAME, ENDED)]}
    office.handle(TICK)
    assert office.dispatcher.answers == {}
    with pytest.raises(InvariantError, match="nobody asked"):
        office.handle(TICK)


def test_a_client_that_leaves_after_its_answer_ended_is_no_news() -> None:
    office = Office()
    office.handle(ClientGone(NAME))
    del office.dispatcher.answers[NAME]
    office.handle(ClientGone(NAME))
    assert office.core.handled == [ClientGone(NAME)]


def test_a_link_is_lost_once_and_nothing_is_sent_to_it_afterwards() -> None:
    office = Office()
    office.core.script = {TICK: [CancelAttempt(office.link, NAME, Attempt(0)), DrainAsked(office.link)]}
    sent = office.handle(TICK)
    assert [command.message.WhichOneof("message") for command in sent if isinstance(command, Send)] == [
        "cancel",
        "drain",
    ]
    office.handle(LinkLost(office.link, "reset"))
    office.handle(LinkLost(office.link, "reset"))
    assert office.core.handled.count(LinkLost(office.link, "reset")) == 1
    assert office.handle(TICK) == []


def test_a_link_that_the_core_drops_is_not_reported_as_lost() -> None:
    office = Office()
    office.core.script = {TICK: [DropLink(office.link, "there is a later one", PeerFault.INCARNATION)]}
    (close,) = office.handle(TICK)
    assert isinstance(close, DropLink)
    assert close.is_dismissal
    assert office.handle(TICK) == []
    office.handle(LinkLost(office.link, "there is a later one"))
    assert office.core.handled == [TICK, TICK]


def test_only_a_successor_makes_a_drop_a_dismissal() -> None:
    assert not DropLink(LinkId(1), "silent", None).is_dismissal
    assert not DropLink(LinkId(1), "layout", PeerFault.LAYOUT).is_dismissal


def test_the_alarm_rings_at_the_earliest_time_that_the_core_has_named() -> None:
    office = Office()
    office.core.due_s = 5.0
    assert office.handle(DRAIN) == [SetAlarm(5.0)]
    assert office.handle(DRAIN) == []
    office.core.due_s = 3.0
    assert office.handle(DRAIN) == [SetAlarm(3.0)]
    assert office.handle(Rang(5.0)) == []
    assert Tick() not in office.core.handled
    office.core.due_s = None
    assert office.handle(Rang(3.0)) == []
    assert office.core.handled[-1] == Tick()


def test_orders_are_sent_as_messages() -> None:
    office = Office()
    office.core.script = {TICK: [DrainAsked(office.link)]}
    assert office.handle(TICK) == [Send(office.link, link.AttachResponse(drain=link.Drain()))]


async def test_a_worker_that_does_not_read_can_be_dropped_in_the_same_moment() -> None:
    core = ScriptedCore()
    shell = Shell(core, VirtualClock())  # type: ignore[arg-type]  # any core
    stream = shell.open_stream(None)
    stream.outbound = asyncio.Queue(1)
    silent = DropLink(stream.link_id, "silent for 4.0 s")
    core.script = {TICK: [DrainAsked(stream.link_id), DrainAsked(stream.link_id), silent]}
    shell.post(TICK)
    assert stream.closed == "it does not read: 4096 messages wait"
    assert not shell.broken.done()
    assert core.handled == [TICK], "its loss is known to the core"
