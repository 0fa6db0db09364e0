"""Feeds events to a router's core one at a time, and hands its commands to whom they are for. No I/O.

Invariant: what an event leads to is done before the next is handled; a link is reported as lost once at most, and
nothing is sent to it afterwards; each answer ends once.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from pdserve.base.errors import InvariantError
from pdserve.base.ids import RequestId
from pdserve.base.values import value
from pdserve.proto.v1 import link_pb2
from pdserve.protocol.refusal import Refused
from pdserve.router import wire
from pdserve.router.requests.commands import Command as CoreCommand
from pdserve.router.requests.commands import Deliver, DropLink, End, Finished, Warn
from pdserve.router.requests.events import ClientEvent, ClientGone, Event, LinkId, LinkLost, RequestArrived, Tick


class Core(Protocol):
    """A router's decisions: `core.RouterCore`."""

    def handle(self, event: Event, now_s: float) -> list[CoreCommand]: ...
    def next_wakeup_s(self) -> float | None: ...


class Answer(Protocol):
    """Whoever waits for a request's tokens and its end."""

    def deliver(self, command: Deliver) -> ClientEvent | None: ...
    def end(self, outcome: Finished | Refused) -> None: ...


AnswerT = TypeVar("AnswerT", bound=Answer)


@value
class Rang:
    """The time of a SetAlarm has come."""

    at_s: float


@value
class Send:
    link: LinkId
    message: link_pb2.AttachResponse


@value
class SetAlarm:
    """Let Rang follow; it takes the place of any alarm that was set before."""

    at_s: float


Command = Send | DropLink | SetAlarm | Warn


class Dispatcher(Generic[AnswerT]):
    def __init__(self, core: Core) -> None:
        self.answers: dict[RequestId, AnswerT] = {}
        self._core = core
        self._events: deque[Event | Rang] = deque()
        self._is_busy = False
        self._links: set[LinkId] = set()
        self._last_link = 0
        self._alarm_s: float | None = None

    def open_link(self) -> LinkId:
        self._last_link += 1
        link_id = LinkId(self._last_link)
        self._links.add(link_id)
        return link_id

    def handle_arrival(self, event: RequestArrived, answer: AnswerT, now_s: float) -> Iterator[Command]:
        """Handle the arrival of a request; `answer` receives its tokens and its end."""
        self.answers[event.request_id] = answer
        return self.handle(event, now_s)

    def handle(self, event: Event | Rang, now_s: float) -> Iterator[Command]:
        """Handle an event, now or after the one whose commands are being carried out; yields what is to be done."""
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._events:
                for command in self._decide(self._events.popleft(), now_s):
                    yield from self._carry_out(command)
        finally:
            self._is_busy = False
        due_s = self._core.next_wakeup_s()
        if due_s is not None and (self._alarm_s is None or due_s < self._alarm_s):
            self._alarm_s = due_s
            yield SetAlarm(due_s)

    def _decide(self, event: Event | Rang, now_s: float) -> list[CoreCommand]:
        match event:
            case Rang(at_s):
                if at_s != self._alarm_s:
                    return []  # another has taken its place
                self._alarm_s = None
                return self._core.handle(Tick(), now_s)
            case LinkLost(link_id):
                if link_id not in self._links:
                    return []  # dropped already
                self._links.remove(link_id)
            case ClientGone(request_id) if request_id not in self.answers:
                return []  # ended already
        return self._core.handle(event, now_s)

    def _carry_out(self, command: CoreCommand) -> Sequence[Command]:
        """Return what is left to be done: nothing for the tokens that nearly all commands are."""
        match command:
            case Deliver():
                answer = self.answers.get(command.request_id)
                news = None if answer is None else answer.deliver(command)
                if news is not None:
                    self._events.append(news)
            case End(request_id, outcome):
                answer = self.answers.pop(request_id, None)
                if answer is None:
                    raise InvariantError(f"request {request_id.hex()} ended, but nobody asked for it")
                answer.end(outcome)
            case DropLink(link_id):
                if link_id in self._links:
                    self._links.remove(link_id)
                    return (command,)
            case Warn():
                return (command,)
            case _:  # a link may have been lost in the same moment: the core handles that next
                sent = wire.messages(command)
                return [Send(link_id, message) for link_id, message in sent if link_id in self._links]
        return ()
