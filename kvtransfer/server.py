"""The receiver's end of the hand-off streams: HandoffService, around a `roster.Roster`, and where it listens."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import ConfigError, PeerFault, ProtocolError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer import roster, wire
from pdserve.kvtransfer.doors import (
    IncomingEvent,
    PeerGone,
    SenderAlive,
    SenderAttached,
    SenderLost,
    SenderMessage,
    Sink,
)
from pdserve.kvtransfer.ranked_mover import AnyMover
from pdserve.kvtransfer.roster import Roster, StreamId
from pdserve.kvtransfer.session import FromReceiver, Hello, HelloAck, Introduction
from pdserve.kvtransfer.wire import Request, Response
from pdserve.net.coalescing import next_message
from pdserve.net.credentials import Credentials
from pdserve.net.rpc import abort, join_address, running, split_address
from pdserve.proto.v1.handoff_pb2_grpc import HandoffServiceServicer, add_HandoffServiceServicer_to_server
from pdserve.settings.config import WorkerConfig

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
CUT = "its stream was cut"
FLUSH_TIMEOUT_S = 1.0  # for what is queued when a stream is ended here
MAX_QUEUED = 4096  # messages to one peer
STOP_GRACE_S = 1.0
EVERYWHERE = ("", "0.0.0.0", "::")  # hosts that nobody can dial

Context: TypeAlias = "grpc.aio.ServicerContext[Request, Response]"


@dataclass(slots=True, eq=False)
class _Stream:
    stream_id: StreamId
    outbound: asyncio.Queue[Response | None] = field(default_factory=asyncio.Queue)  # None: write nothing more
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = CUT

    def end(self, reason: str) -> None:
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()


class HandoffServicer(HandoffServiceServicer):
    """Lets senders attach; one stream each, the latest."""

    def __init__(
        self, me: Introduction, mover: AnyMover, sink: Sink[IncomingEvent], refused: Counter[PeerFault]
    ) -> None:
        """`refused` counts what is refused here, beside what its owner counts."""
        self._ack = wire.ack_to_proto(HelloAck(me, mover.describe()))
        self._sink = sink
        self._refused = refused
        self._roster = Roster(me, mover.name)
        self._clock = MonotonicClock()
        self._streams: dict[StreamId, _Stream] = {}
        self._last_stream = 0

    @property
    def attached(self) -> tuple[Peer, ...]:
        return self._roster.attached

    def send(self, peer: Peer, key: AttemptKey, command: FromReceiver) -> None:
        """Queue a message; nothing happens for a peer that is not attached. A full queue ends its stream."""
        stream_id = self._roster.stream_of(peer)
        if stream_id is None:
            return
        stream = self._streams[stream_id]
        if stream.outbound.qsize() >= MAX_QUEUED:
            stream.end(f"it does not read: {stream.outbound.qsize()} messages wait")
            self._perform(self._roster.end(stream_id, stream.reason))
            return
        stream.outbound.put_nowait(wire.from_receiver(key, command))

    def forget(self, peer: Peer) -> None:
        """End the stream of a process that is known to have ended, and let it attach no more."""
        self._perform(self._roster.forget(peer))

    def close(self) -> None:
        """End every stream once what is queued has been written."""
        for stream in self._streams.values():
            stream.end("this worker leaves")

    async def Attach(  # type: ignore[override]  # replies are written to the context  # noqa: N802
        self, request_iterator: AsyncIterator[Request], context: Context
    ) -> None:
        self._last_stream += 1
        stream = _Stream(StreamId(self._last_stream))
        self._streams[stream.stream_id] = stream
        try:
            hello = await _first(request_iterator)
            commands = self._roster.attach(stream.stream_id, hello, self._clock.now_s())
            stream.outbound.put_nowait(self._ack)
            self._perform(commands)
            await self._serve(stream, request_iterator, context)
        except ProtocolError as error:
            self._refused[error.refusal] += 1
            logger.warning("a sender is refused: %s", error)
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            del self._streams[stream.stream_id]
            self._perform(self._roster.end(stream.stream_id, stream.reason))

    def _perform(self, commands: Iterable[roster.Command]) -> None:
        for command in commands:
            match command:
                case roster.Close(stream_id, reason):
                    self._streams[stream_id].end(reason)
                    continue
                case SenderAttached(peer):
                    logger.info("%s: attached, incarnation %016x", peer.worker_id, peer.incarnation)
                case SenderLost(peer, reason):
                    logger.info("%s: detached: %s", peer.worker_id, reason)
                case PeerGone(peer):
                    logger.info("%s: its incarnation %016x has ended", peer.worker_id, peer.incarnation)
            self._sink.put(command)

    async def _serve(self, stream: _Stream, messages: AsyncIterator[Request], context: Context) -> None:
        name = f"handoff stream {stream.stream_id}"
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(stream, messages), name=f"{name} reader")
            writer = tasks.create_task(_write(stream, context), name=f"{name} writer")
            await stream.ended.wait()
            reader.cancel()
            stream.outbound.put_nowait(None)
            await asyncio.wait([writer], timeout=FLUSH_TIMEOUT_S)
            cut = writer.cancel()
        if cut:
            # A write that is stuck leaves no room for a status; gRPC cuts a call whose handler is cancelled.
            raise asyncio.CancelledError

    async def _read(self, stream: _Stream, messages: AsyncIterator[Request]) -> None:
        async for message in messages:
            for each in (message, *message.more):
                await self._take(stream.stream_id, each)
        stream.end("it ended its stream")

    async def _take(self, stream_id: StreamId, message: Request) -> None:
        peer = self._roster.receive(stream_id, self._clock.now_s())
        if peer is None:
            return
        try:
            alive = message.HasField("alive")
            event = SenderAlive(peer) if alive else SenderMessage(peer, *wire.to_receiver(message))
        except ProtocolError as error:
            self._refused[error.refusal] += 1
            logger.warning("stream %d: refused: %s", stream_id, error)
            return
        await self._sink.offer(event)


async def _first(messages: AsyncIterator[Request]) -> Hello:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            async for message in messages:
                return wire.hello_from_proto(message)
    except TimeoutError:
        raise ProtocolError(f"message: no hello within {HELLO_TIMEOUT_S:g} s") from None
    raise ProtocolError("message: no hello")


async def _write(stream: _Stream, context: Context) -> None:
    message = await stream.outbound.get()  # the answer to hello: no message is written together with it
    while message is not None:
        try:
            await context.write(message)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            stream.end(CUT)
            return
        message = await next_message(stream.outbound)


def check_addresses(config: WorkerConfig) -> None:
    """Raise ConfigError where senders could not learn where to find this worker, whatever role it is given."""
    address = config.handoff_advertise
    if address is None and config.handoff_host in EVERYWHERE:
        raise ConfigError(f"handoff_advertise: is required where handoff_host is {config.handoff_host!r}")
    host, port = split_address(address or config.handoff_host)
    if not host or (port and not port.isdigit()):
        raise ConfigError(f"handoff_advertise: {address!r} is neither host nor host:port")


def advertised(config: WorkerConfig, bound: str) -> str:
    """Return where senders reach this worker, which listens on the address `bound`."""
    if config.handoff_advertise is None:
        return bound
    host, port = split_address(config.handoff_advertise)
    return join_address(host, int(port or split_address(bound)[1]))


@asynccontextmanager
async def listening(
    servicer: HandoffServicer, config: WorkerConfig, credentials: Credentials, on_denied: Callable[[PeerFault], None]
) -> AsyncIterator[str]:
    """Let senders attach for the length of the block; yields the address that they get."""
    server = credentials.server(on_denied)
    add_HandoffServiceServicer_to_server(servicer, server)
    bound = credentials.listen(server, config.handoff_host, config.handoff_port, "handoff_port")
    async with running(server, STOP_GRACE_S):
        try:
            yield advertised(config, bound)
        finally:
            servicer.close()
