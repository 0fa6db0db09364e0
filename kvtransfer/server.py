"""The decode worker's end of the control streams: HandoffService."""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from pdserve.clock import MonotonicClock
from pdserve.errors import ProtocolError, Refusal
from pdserve.ids import Incarnation, WorkerId
from pdserve.kvtransfer import wire
from pdserve.kvtransfer.peers import Party, PeerAlive, PeerAttached, PeerGone, PeerLost, PeerMessage, ReceiverSink
from pdserve.kvtransfer.plan import refusal
from pdserve.kvtransfer.session import HandoffKey, Peer
from pdserve.proto.v1 import handoff_pb2 as handoff
from pdserve.proto.v1.handoff_pb2_grpc import HandoffServiceServicer
from pdserve.rpc import abort

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
CUT = "its stream was cut"
LAST_WORDS_S = 1.0  # for what is queued when a stream is ended here
MAX_QUEUED = 4096  # messages to one peer
MAX_GONE = 4096  # ended processes that are remembered, and refused
MAX_KNOWN = 4096  # workers whose last process is remembered: those that were heard last

Request = handoff.HandoffServiceAttachRequest
Response = handoff.HandoffServiceAttachResponse
Context: TypeAlias = "grpc.aio.ServicerContext[Request, Response]"


@dataclass(slots=True, eq=False)
class _Stream:
    peer: Peer
    outbound: asyncio.Queue[Response | None] = field(default_factory=asyncio.Queue)  # None: say nothing more
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = CUT

    def end(self, reason: str) -> None:
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()


@dataclass(slots=True)
class _Seen:
    """The last process of a worker that has attached, and when it was last heard."""

    incarnation: Incarnation
    heard_s: float


class HandoffServicer(HandoffServiceServicer):
    """Lets prefill workers attach; one stream each, the latest."""

    def __init__(self, me: Party, sink: ReceiverSink, refused: Counter[Refusal], tasks: asyncio.TaskGroup) -> None:
        """`refused` counts what is refused here, beside what its owner counts."""
        self._me = me
        self._ack = wire.ack_to_proto(wire.HelloAck(wire.Introduction(me.peer, me.layout), me.mover.describe()))
        self._sink = sink
        self._streams: dict[Peer, _Stream] = {}
        self._tasks = tasks
        self._is_closing = False
        self._news: set[asyncio.Task[None]] = set()  # of earlier processes, on its way to the sink
        # Of each worker that has attached, unless its end is known; the last heard is last.
        self._latest: OrderedDict[WorkerId, _Seen] = OrderedDict()
        self._clock = MonotonicClock()
        self._gone: OrderedDict[Peer, None] = OrderedDict()
        self._refused = refused

    @property
    def attached(self) -> tuple[Peer, ...]:
        return tuple(self._streams)

    def send(self, peer: Peer, key: HandoffKey, command: wire.FromReceiver) -> None:
        """Queue a message; nothing happens for a peer that is not attached. A full queue ends its stream."""
        stream = self._streams.get(peer)
        if stream is None:
            return
        if stream.outbound.qsize() >= MAX_QUEUED:
            stream.end(f"it does not read: {stream.outbound.qsize()} messages wait")
            return
        stream.outbound.put_nowait(wire.from_receiver(key, command))

    def forget(self, peer: Peer) -> None:
        """End a peer's stream and attach it no more: its process is known to have ended."""
        self._gone[peer] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        seen = self._latest.get(peer.worker_id)
        if seen is not None and seen.incarnation == peer.incarnation:
            del self._latest[peer.worker_id]
        stream = self._streams.get(peer)
        if stream is not None:
            stream.end("its process has ended")

    def close(self) -> None:
        """End every stream once what is queued has been said, and pass on nothing more of earlier processes."""
        self._is_closing = True
        for news in self._news:
            news.cancel()
        for stream in self._streams.values():
            stream.end("this worker leaves")

    async def Attach(  # type: ignore[override]  # replies are written to the context  # noqa: N802
        self, request_iterator: AsyncIterator[Request], context: Context
    ) -> None:
        try:
            hello = await _first(request_iterator)
            peer = self._check(hello)
        except ProtocolError as error:
            self._refused[error.refusal] += 1
            logger.warning("a prefill worker is refused: %s", error)
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        stream = _Stream(peer)
        try:
            await self._welcome(stream, hello.age_s)
            await self._attend(stream, request_iterator, context)
        finally:
            if self._streams.get(peer) is stream:
                del self._streams[peer]
                logger.info("%s: detached: %s", peer.worker_id, stream.reason)
                await self._sink(PeerLost(peer, stream.reason))

    def _check(self, hello: wire.Hello) -> Peer:
        """Return who says hello; ProtocolError names what differs."""
        me, peer = self._me, hello.me.peer
        if hello.decode_incarnation != me.peer.incarnation:
            text = f"decode_incarnation: {hello.decode_incarnation:016x}, here is {me.peer.incarnation:016x}"
            raise ProtocolError(text, Refusal.INCARNATION)
        reason = refusal(hello.me.layout, me.layout)
        if reason is not None:
            raise ProtocolError(f"layout.{reason}", Refusal.LAYOUT)
        if hello.mover != me.mover.name:
            raise ProtocolError(f"mover: {hello.mover} there, {me.mover.name} here", Refusal.MOVER)
        if peer in self._gone:
            text = f"incarnation: {peer.incarnation:016x} of {peer.worker_id} has ended, or has a successor"
            raise ProtocolError(text, Refusal.INCARNATION)
        seen = self._latest.get(peer.worker_id)
        if seen is not None and seen.incarnation > peer.incarnation:
            text = f"incarnation: {peer.incarnation:016x} of {peer.worker_id} started before {seen.incarnation:016x}"
            raise ProtocolError(text, Refusal.INCARNATION)
        return peer

    async def _welcome(self, stream: _Stream, age_s: float) -> None:
        """Put a stream in the place of an earlier one, or of an earlier process, of the same worker."""
        peer = stream.peer
        before = self._streams.get(peer)
        self._streams[peer] = stream
        stream.outbound.put_nowait(self._ack)
        now_s, seen = self._clock.now_s(), self._latest.get(peer.worker_id)
        self._latest[peer.worker_id] = _Seen(peer.incarnation, now_s)
        self._latest.move_to_end(peer.worker_id)
        if len(self._latest) > MAX_KNOWN:
            self._latest.popitem(last=False)
        if seen is not None and seen.incarnation != peer.incarnation:
            self._succeed(Peer(peer.worker_id, seen.incarnation), was_heard=seen.heard_s > now_s - age_s)
        if before is not None:
            before.end("it attached anew")
            await self._sink(PeerLost(peer, "it attached anew"))
        logger.info("%s: attached, incarnation %016x", peer.worker_id, peer.incarnation)
        await self._sink(PeerAttached(peer))

    def _succeed(self, older: Peer, *, was_heard: bool) -> None:
        """Let an earlier process of a worker attach no more. Attached, or heard since the later started, it lives."""
        stream = self._streams.pop(older, None)
        if stream is not None:
            stream.end("it has a successor")
        self.forget(older)
        if stream is None and not was_heard:
            logger.info("%s: its incarnation %016x has ended", older.worker_id, older.incarnation)
            self._tell(PeerGone(older))
            return
        logger.warning("%s: its incarnation %016x has a successor and lives", older.worker_id, older.incarnation)
        if stream is not None:
            self._tell(PeerLost(older, stream.reason))

    def _tell(self, news: PeerGone | PeerLost) -> None:
        """Pass on news of an earlier process, however long it takes, and whatever becomes of the later one's stream."""
        if self._is_closing:
            return
        telling = self._tasks.create_task(self._pass_on(news), name=f"news of {news.peer.worker_id}")
        self._news.add(telling)
        telling.add_done_callback(self._news.discard)

    async def _pass_on(self, news: PeerGone | PeerLost) -> None:
        await self._sink(news)

    def _hear(self, peer: Peer) -> None:
        seen = self._latest.get(peer.worker_id)
        if seen is not None and seen.incarnation == peer.incarnation:
            seen.heard_s = self._clock.now_s()
            self._latest.move_to_end(peer.worker_id)

    async def _attend(self, stream: _Stream, messages: AsyncIterator[Request], context: Context) -> None:
        """Read and write until the stream ends."""
        name = f"handoff {stream.peer.worker_id}"
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(stream, messages), name=f"{name} reader")
            writer = tasks.create_task(_write(stream, context), name=f"{name} writer")
            await stream.ended.wait()
            reader.cancel()
            stream.outbound.put_nowait(None)
            await asyncio.wait([writer], timeout=LAST_WORDS_S)
            cut = writer.cancel()
        if cut:
            # A write that is stuck leaves no room for a status; gRPC cuts a call whose handler is cancelled.
            raise asyncio.CancelledError

    async def _read(self, stream: _Stream, messages: AsyncIterator[Request]) -> None:
        async for message in messages:
            self._hear(stream.peer)
            if message.HasField("alive"):
                await self._sink(PeerAlive(stream.peer))
                continue
            try:
                key, event = wire.to_receiver(message)
            except ProtocolError as error:
                self._refused[error.refusal] += 1
                logger.warning("%s: refused: %s", stream.peer.worker_id, error)
                continue
            await self._sink(PeerMessage(stream.peer, key, event))
        stream.end("it ended its stream")


async def _first(messages: AsyncIterator[Request]) -> wire.Hello:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            async for message in messages:
                return wire.hello_from_proto(message)
    except TimeoutError:
        raise ProtocolError(f"message: no hello within {HELLO_TIMEOUT_S:g} s") from None
    raise ProtocolError("message: no hello")


async def _write(stream: _Stream, context: Context) -> None:
    while (message := await stream.outbound.get()) is not None:
        try:
            await context.write(message)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            stream.end(CUT)
            return
