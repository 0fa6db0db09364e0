"""Where the desk and its core meet clock, clients and workers. Everything here runs on one event loop."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from pdserve.clock import Clock
from pdserve.errors import Refusal
from pdserve.ids import RequestId
from pdserve.proto.v1 import link_pb2 as link
from pdserve.router.commands import Warn
from pdserve.router.core import RouterCore
from pdserve.router.desk import Answer, Close, Command, Desk, Rang, Send, SetAlarm
from pdserve.router.events import ClientGone, Event, LinkId, LinkLost, RequestArrived

logger = logging.getLogger(__name__)

MAX_QUEUED = 4096  # messages to one worker


class WorkerStream:
    """What the shell keeps of one worker's link."""

    def __init__(self, link_id: LinkId, owner: asyncio.Task[object] | None) -> None:
        self.link_id = link_id
        self.outbound: asyncio.Queue[link.AttachResponse] = asyncio.Queue(MAX_QUEUED)
        self.registration = link.Register()  # as last received, for operators
        self.load = link.Heartbeat()
        self.pairs: dict[str, link.PairMeasured] = {}  # by the decode worker's name
        self.closed: str | None = None  # why
        self.is_dismissed = False  # the worker's process must end
        self._owner = owner

    def close(self, reason: str, *, is_dismissal: bool = False) -> None:
        """End the stream: interrupt the task that owns it, whatever it waits for."""
        if self.closed is None:
            self.closed, self.is_dismissed = reason, is_dismissal
            if self._owner is not None:
                self._owner.cancel()


class Shell:
    """Feeds the core and carries out what it says, at once and in order."""

    def __init__(self, core: RouterCore, clock: Clock) -> None:
        self.core = core
        self.clock = clock
        self.streams: dict[LinkId, WorkerStream] = {}
        self.watchers: set[asyncio.Event] = set()  # set whenever something may have changed
        self.refused: Counter[Refusal] = Counter()  # messages of workers, and workers, since start
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the core's own error
        self._desk: Desk[Answer] = Desk(core)
        self._alarm: asyncio.TimerHandle | None = None

    def post(self, event: Event | Rang) -> None:
        """Handle an event now, or right after the one that is being handled."""
        self._carry_out(self._desk.handle(event, self.clock.now_s()))

    def admit(self, event: RequestArrived, answer: Answer) -> None:
        """Hand a request to the core; `answer` receives its tokens and its end."""
        self._carry_out(self._desk.admit(event, answer, self.clock.now_s()))

    def leave(self, request_id: RequestId) -> None:
        """Note that nobody waits for an answer any more."""
        self.post(ClientGone(request_id))

    def open_stream(self, owner: asyncio.Task[object] | None) -> WorkerStream:
        stream = WorkerStream(self._desk.open(), owner)
        self.streams[stream.link_id] = stream
        return stream

    def close_stream(self, stream: WorkerStream) -> None:
        """Note that a worker's stream is over, whoever ended it."""
        self.streams.pop(stream.link_id, None)
        self.post(LinkLost(stream.link_id, stream.closed or "its stream ended"))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return as soon as something holds that depends on the core."""
        news = asyncio.Event()
        self.watchers.add(news)
        try:
            while not holds():
                await news.wait()
                news.clear()
        finally:
            self.watchers.discard(news)

    def _carry_out(self, commands: Iterable[Command]) -> None:
        try:
            for command in commands:
                self._perform(command)
        except Exception as error:
            if not self.broken.done():
                self.broken.set_exception(error)
            raise
        for watcher in self.watchers:
            watcher.set()

    def _perform(self, command: Command) -> None:
        match command:
            case Send(link_id, message):
                self._send(link_id, message)
            case Close(link_id, reason, refusal):
                stream = self.streams.pop(link_id, None)
                if stream is not None:  # else it did not read just now, and is closed already
                    stream.close(reason, is_dismissal=command.is_dismissal)
                if refusal is not None:
                    self.refused[refusal] += 1
            case SetAlarm(at_s):
                if self._alarm is not None:
                    self._alarm.cancel()
                delay_s = max(0.0, at_s - self.clock.now_s())
                self._alarm = asyncio.get_running_loop().call_later(delay_s, self.post, Rang(at_s))
            case Warn(text):
                logger.warning("%s", text)

    def _send(self, link_id: LinkId, message: link.AttachResponse) -> None:
        stream = self.streams.get(link_id)
        if stream is None:
            return  # it did not read just now; the core handles its loss next
        try:
            stream.outbound.put_nowait(message)
        except asyncio.QueueFull:
            stream.close(f"it does not read: {MAX_QUEUED} messages wait")
            self.close_stream(stream)
