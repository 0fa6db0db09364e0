"""Where the dispatcher and its core meet clock, clients and workers' streams. One event loop runs all of it."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable

import grpc

from pdserve.base.clock import Clock
from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.net.coalescing import next_message
from pdserve.net.rpc import DISMISSED_STATUS, AnyContext, abort
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.link_pb2_grpc import LinkServiceServicer
from pdserve.router import wire
from pdserve.router.dispatcher import Answer, Command, Dispatcher, Rang, Send, SetAlarm
from pdserve.router.requests.commands import DropLink, Warn
from pdserve.router.requests.core import RouterCore
from pdserve.router.requests.events import Event, LinkId, LinkLost, RequestArrived
from pdserve.router.requests.recent import Kind

logger = logging.getLogger(__name__)

MAX_QUEUED = 4096  # messages to one worker
REGISTER_TIMEOUT_S = 10.0
MAX_PAIRS = 4096  # shown of one worker
STREAM_ENDED = "its stream ended"


class WorkerStream:
    """What the shell keeps of one worker's link."""

    def __init__(self, link_id: LinkId, owner: asyncio.Task[object] | None) -> None:
        self.link_id = link_id
        self.outbound: asyncio.Queue[link.AttachResponse | None] = asyncio.Queue(MAX_QUEUED)
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
        self.num_changes = 0  # how often something may have changed
        self._awaited: dict[asyncio.Event, Callable[[], bool]] = {}  # set once it holds
        self.refused: Counter[PeerFault] = Counter()  # messages of workers, and workers, since start
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # our own error
        self._desk: Dispatcher[Answer] = Dispatcher(core)
        self._alarm: asyncio.TimerHandle | None = None

    def post(self, event: Event | Rang) -> None:
        """Handle an event now, or right after the one that is being handled."""
        self._carry_out(self._desk.handle(event, self.clock.now_s()))

    def post_arrival(self, event: RequestArrived, answer: Answer) -> None:
        """Hand a request to the core; `answer` receives its tokens and its end."""
        self._carry_out(self._desk.handle_arrival(event, answer, self.clock.now_s()))

    def open_stream(self, owner: asyncio.Task[object] | None) -> WorkerStream:
        stream = WorkerStream(self._desk.open_link(), owner)
        self.streams[stream.link_id] = stream
        return stream

    def close_stream(self, stream: WorkerStream) -> None:
        self.streams.pop(stream.link_id, None)
        self.post(LinkLost(stream.link_id, stream.closed or STREAM_ENDED))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return as soon as something holds that depends on the core."""
        while not holds():
            news = asyncio.Event()
            self._awaited[news] = holds
            try:
                await news.wait()
            finally:
                del self._awaited[news]

    def fail(self, error: Exception) -> None:
        """Stop the process: an error that is ours leaves its state unknown."""
        if not self.broken.done():
            self.broken.set_exception(error)

    def _carry_out(self, commands: Iterable[Command]) -> None:
        try:
            for command in commands:
                self._perform(command)
        except Exception as error:
            self.fail(error)
            raise
        self.note_change()

    def note_change(self) -> None:
        """Wake those who wait for something that may have changed."""
        self.num_changes += 1
        for news, holds in self._awaited.items():
            if holds():
                news.set()

    def _perform(self, command: Command) -> None:
        match command:
            case Send(link_id, message):
                self._send(link_id, message)
            case DropLink(link_id, reason, refusal):
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
            case Warn(text, names_request):
                logger.warning("%s", text)
                if not names_request:
                    self.core.placements.recent.note(Kind.WARNING, "", text)

    def _send(self, link_id: LinkId, message: link.AttachResponse) -> None:
        stream = self.streams.get(link_id)
        if stream is None:
            return  # it did not read just now; the core handles its loss next
        try:
            stream.outbound.put_nowait(message)
        except asyncio.QueueFull:
            stream.close(f"it does not read: {MAX_QUEUED} messages wait")
            self.close_stream(stream)


class Links(LinkServiceServicer):
    """The workers' endpoint, LinkService. One task reads a worker's stream, another writes to it."""

    def __init__(self, shell: Shell, welcome: link.Welcome) -> None:
        self._shell = shell
        self._welcome = welcome

    async def Attach(  # type: ignore[override]  # replies are written to the context
        self, request_iterator: AsyncIterator[link.AttachRequest], context: AnyContext
    ) -> None:
        task = asyncio.current_task()
        stream = self._shell.open_stream(task)
        try:
            await self._attend(stream, request_iterator, context)
        except asyncio.CancelledError:
            if task is None or stream.closed is None or task.uncancel():
                raise  # the worker has gone, or the server stops
        finally:
            self._shell.close_stream(stream)
        if stream.closed != STREAM_ENDED:
            code = DISMISSED_STATUS if stream.is_dismissed else grpc.StatusCode.FAILED_PRECONDITION
            await abort(context, code, stream.closed or "")

    async def _attend(
        self, stream: WorkerStream, messages: AsyncIterator[link.AttachRequest], context: AnyContext
    ) -> None:
        """Read and write until either side closes the stream, which cancels both."""
        # On its own: a first write that is interrupted leaves gRPC unsure whether this has been sent.
        await context.send_initial_metadata(())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(stream, messages), name=f"link {stream.link_id} reader")
            await context.write(link.AttachResponse(welcome=self._welcome))
            while (message := await next_message(stream.outbound)) is not None:
                await context.write(message)

    async def _read(self, stream: WorkerStream, messages: AsyncIterator[link.AttachRequest]) -> None:
        try:
            await self._read_registration(stream, messages)
            async for message in messages:
                for each in (message, *message.more):
                    self._take(stream, each)
        except (ProtocolError, TimeoutError) as error:
            logger.warning("worker %r is dropped: %s", stream.registration.worker_id, error)
            if isinstance(error, ProtocolError):
                self._shell.refused[error.refusal] += 1
            stream.close(str(error) or "no registration came in time")
        stream.close(STREAM_ENDED)

    async def _read_registration(self, stream: WorkerStream, messages: AsyncIterator[link.AttachRequest]) -> None:
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            async for message in messages:
                if message.WhichOneof("message") != "register":
                    raise ProtocolError(f"message: {message.WhichOneof('message')} before register")
                self._take(stream, message)
                return

    def _take(self, stream: WorkerStream, message: link.AttachRequest) -> None:
        events = wire.worker_events(stream.link_id, message)
        match message.WhichOneof("message"):
            case "register":
                stream.registration = message.register
                level = logging.INFO if message.register.ready or not message.register.load_progress else logging.DEBUG
                logger.log(level, "worker %s: %s", message.register.worker_id, _summary(message.register))
            case "heartbeat":
                stream.load = message.heartbeat
            case "pair" if len(stream.pairs) < MAX_PAIRS:
                stream.pairs[message.pair.decode_worker_id] = message.pair
            case _:
                pass  # the core's alone
        for event in events:
            self._shell.post(event)


def _summary(register: link.Register) -> str:
    role = link.Role.Name(register.role).removeprefix("ROLE_").lower()
    state = "ready" if register.ready else f"loading, {register.load_progress:.0%}"
    return f"{role}, incarnation {register.incarnation:016x}, {state}"
