"""Where the core meets clock, clients and workers. Everything here runs on one event loop."""

import asyncio
import logging
from collections import Counter, deque
from dataclasses import dataclass

from pdserve.clock import Clock
from pdserve.errors import InvariantError, Refusal
from pdserve.ids import RequestId
from pdserve.proto.v1 import link_pb2 as link
from pdserve.router import wire
from pdserve.router.answer import Answer
from pdserve.router.core import RouterCore
from pdserve.router.events import (
    CancelAttempt,
    ClientGone,
    Command,
    Deliver,
    DropLink,
    End,
    Event,
    LinkId,
    LinkLost,
    Place,
    RequestArrived,
    SendDrain,
    SendProcessGone,
    Tick,
    Warn,
)

logger = logging.getLogger(__name__)

MAX_QUEUED = 4096  # messages to one worker


class WorkerStream:
    """What the shell keeps of one worker's link."""

    def __init__(self, link_id: LinkId, owner: asyncio.Task[object] | None) -> None:
        self.link_id = link_id
        self.outbound: asyncio.Queue[link.AttachResponse] = asyncio.Queue(MAX_QUEUED)
        self.registration = link.Register()  # as last told, for operators
        self.load = link.Heartbeat()
        self.pairs: dict[str, link.PairMeasured] = {}  # by the decode worker's name
        self.closed: str | None = None  # why
        self.refusal: Refusal | None = None  # what was wrong with the worker, if that is why
        self._owner = owner

    def close(self, reason: str, refusal: Refusal | None = None) -> None:
        """End the stream: interrupt the task that owns it, whatever it waits for."""
        if self.closed is None:
            self.closed, self.refusal = reason, refusal
            if self._owner is not None:
                self._owner.cancel()


@dataclass(slots=True)
class _Alarm:
    at_s: float
    handle: asyncio.TimerHandle


class Shell:
    """Feeds the core and carries out what it says, at once and in order."""

    def __init__(self, core: RouterCore, clock: Clock) -> None:
        self.core = core
        self.clock = clock
        self.streams: dict[LinkId, WorkerStream] = {}
        self.watchers: set[asyncio.Event] = set()  # set whenever something may have changed
        self.refused: Counter[Refusal] = Counter()  # of what workers said, and of workers, since start
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the core's own error
        self._answers: dict[RequestId, Answer] = {}
        self._events: deque[Event] = deque()
        self._is_busy = False
        self._alarm: _Alarm | None = None
        self._last_link = 0

    def post(self, event: Event) -> None:
        """Handle an event now, or right after the one that is being handled."""
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._events:
                for command in self.core.handle(self._events.popleft(), self.clock.now_s()):
                    self._perform(command)
        except Exception as error:
            if not self.broken.done():
                self.broken.set_exception(error)
            raise
        finally:
            self._is_busy = False
        for watcher in self.watchers:
            watcher.set()
        self._set_alarm()

    def admit(self, event: RequestArrived, answer: Answer) -> None:
        """Hand a request to the core; `answer` receives its tokens and its end."""
        self._answers[event.request_id] = answer
        self.post(event)

    def leave(self, request_id: RequestId) -> None:
        """Note that nobody waits for an answer any more."""
        if request_id in self._answers:
            self.post(ClientGone(request_id))

    def open_stream(self, owner: asyncio.Task[object] | None) -> WorkerStream:
        self._last_link += 1
        stream = WorkerStream(LinkId(self._last_link), owner)
        self.streams[stream.link_id] = stream
        return stream

    def close_stream(self, stream: WorkerStream) -> None:
        """Note that a worker's stream is over, whoever ended it."""
        if self.streams.pop(stream.link_id, None) is not None:
            self.post(LinkLost(stream.link_id, stream.closed or "its stream ended"))

    def _perform(self, command: Command) -> None:
        match command:
            case Deliver():
                answer = self._answers.get(command.request_id)
                news = None if answer is None else answer.deliver(command)
                if news is not None:
                    self._events.append(news)
            case End():
                answer = self._answers.pop(command.request_id, None)
                if answer is None:
                    raise InvariantError(f"request {command.request_id.hex()} ended, but nobody asked for it")
                answer.end(command.outcome)
            case Place():
                wire.send_placement(command, self._send)
            case DropLink():
                self._drop(command)
            case Warn():
                logger.warning("%s", command.text)
            case CancelAttempt() | SendDrain() | SendProcessGone():
                self._send(command.link, wire.order(command))

    def _drop(self, command: DropLink) -> None:
        stream = self.streams.pop(command.link, None)
        if stream is not None:
            stream.close(command.reason, command.refusal)
        if command.refusal is not None:
            self.refused[command.refusal] += 1

    def _send(self, link_id: LinkId, message: link.AttachResponse) -> None:
        stream = self.streams.get(link_id)
        if stream is None:
            return  # lost in the same moment; the core hears of it next
        try:
            stream.outbound.put_nowait(message)
        except asyncio.QueueFull:
            stream.close(f"it does not read: {MAX_QUEUED} messages wait")
            del self.streams[link_id]
            self._events.append(LinkLost(link_id, f"it does not read: {MAX_QUEUED} messages wait"))

    def _set_alarm(self) -> None:
        due_s = self.core.next_wakeup_s()
        if due_s is None or (self._alarm is not None and self._alarm.at_s <= due_s):
            return
        if self._alarm is not None:
            self._alarm.handle.cancel()
        delay_s = max(0.0, due_s - self.clock.now_s())
        self._alarm = _Alarm(due_s, asyncio.get_running_loop().call_later(delay_s, self._ring))

    def _ring(self) -> None:
        self._alarm = None
        self.post(Tick())
