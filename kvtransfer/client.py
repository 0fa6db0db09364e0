"""The prefill worker's end of the control streams: one to each decode worker it is paired with."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from pdserve.clock import process_age_s
from pdserve.errors import ProtocolError, Refusal
from pdserve.kvtransfer import wire
from pdserve.kvtransfer.peers import Party, PeerLost, PeerMessage, SenderSink
from pdserve.kvtransfer.plan import refusal
from pdserve.kvtransfer.session import HandoffKey, Peer
from pdserve.proto.v1 import handoff_pb2 as handoff
from pdserve.proto.v1.handoff_pb2_grpc import HandoffServiceStub
from pdserve.rpc import INTERNAL_MESSAGE_BYTES, channel_options, identify

logger = logging.getLogger(__name__)

ATTACH = "/pdserve.v1.HandoffService/Attach"
CONNECT_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 2.0
MAX_QUEUED = 4096  # messages to one peer

Request = handoff.HandoffServiceAttachRequest
Response = handoff.HandoffServiceAttachResponse
Call = grpc.aio.StreamStreamCall[Request, Response]


@dataclass(slots=True, eq=False)
class _Stream:
    """One peer, from the first need until the stream ends. None in the queue: say nothing more."""

    peer: Peer
    address: str
    outbound: asyncio.Queue[Request | None] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None
    reason: str = ""  # why it was ended here


class HandoffClient:
    """Dials on first need, and again on the next need after a stream was lost."""

    def __init__(
        self,
        me: Party,
        secret: bytes,
        sink: SenderSink,
        tasks: asyncio.TaskGroup,
        refused: Counter[Refusal],
        on_attached: Callable[[Peer], None] = lambda _: None,
    ) -> None:
        """`refused` counts what is refused here, beside what its owner counts.

        `on_attached` hears of each stream that stands; the peer's pages can be written then.
        """
        self._refused = refused
        self._on_attached = on_attached
        self._me = me
        self._introduction = wire.Introduction(me.peer, me.layout)
        self._secret = secret
        self._sink = sink
        self._tasks = tasks
        self._streams: dict[Peer, _Stream] = {}
        self._closing = False

    def connect(self, peer: Peer, address: str) -> None:
        """Have a stream to a peer: nothing if it stands or is being dialled. PeerLost follows if it cannot be had."""
        if peer in self._streams or self._closing:
            return
        stream = _Stream(peer, address)
        self._streams[peer] = stream
        stream.task = self._tasks.create_task(self._keep(stream), name=f"handoff {peer.worker_id}")

    def send(self, peer: Peer, key: HandoffKey, command: wire.FromSender) -> None:
        """Queue a message; nothing happens for a peer whose stream is lost. A full queue ends it."""
        stream = self._streams.get(peer)
        if stream is None:
            return
        if stream.outbound.qsize() >= MAX_QUEUED:
            self._end(stream, f"it does not read: {stream.outbound.qsize()} messages wait")
            return
        stream.outbound.put_nowait(wire.from_sender(key, command))

    def beat(self) -> None:
        """Tell every peer that this process's engine loop goes on."""
        for stream in self._streams.values():
            if stream.outbound.qsize() < MAX_QUEUED:
                stream.outbound.put_nowait(wire.ALIVE)

    def forget(self, peer: Peer) -> None:
        """End the stream to a peer: its process is known to have ended."""
        stream = self._streams.get(peer)
        if stream is not None:
            self._end(stream, "its process has ended")

    async def close(self) -> None:
        """Say what is queued, then end every stream and dial no more."""
        self._closing = True
        streams = list(self._streams.values())
        for stream in streams:
            stream.outbound.put_nowait(None)
        tasks = [stream.task for stream in streams if stream.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()

    def _end(self, stream: _Stream, reason: str) -> None:
        del self._streams[stream.peer]  # here, since a task that has not begun would not
        stream.reason = reason
        if stream.task is not None:
            stream.task.cancel()

    async def _keep(self, stream: _Stream) -> None:
        """Serve a stream to its end, and say why it has ended."""
        peer = stream.peer
        reason = "it ended the stream"
        try:
            await self._attach(stream)
        except TimeoutError:
            reason = f"no answer from {stream.address} within {CONNECT_TIMEOUT_S:g} s"
        except ProtocolError as error:
            self._refused[error.refusal] += 1
            reason = str(error)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            if not stream.reason:
                raise
            reason = stream.reason
        finally:
            if self._streams.get(peer) is stream:
                del self._streams[peer]
        if not self._closing:
            logger.warning("%s at %s: %s", peer.worker_id, stream.address, reason)
        await self._sink(PeerLost(peer, reason))

    async def _attach(self, stream: _Stream) -> None:
        channel = grpc.aio.insecure_channel(stream.address, options=channel_options(INTERNAL_MESSAGE_BYTES))
        async with channel:
            call: Call | None = None
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    proof = await identify(channel, self._secret, ATTACH)
                    call = HandoffServiceStub(channel).Attach(metadata=proof)
                    there = await self._greet(call, stream.peer)
                await asyncio.to_thread(self._me.mover.attach, stream.peer, there.mover_metadata)
                logger.info("attached to %s at %s", stream.peer.worker_id, stream.address)
                self._on_attached(stream.peer)
                await self._serve(stream, call)
            finally:
                if call is not None:
                    call.cancel()

    async def _serve(self, stream: _Stream, call: Call) -> None:
        writer = self._tasks.create_task(_write(stream, call), name=f"handoff {stream.peer.worker_id} writer")
        try:
            await self._read(stream.peer, call)
        finally:
            writer.cancel()

    async def _greet(self, call: Call, peer: Peer) -> wire.HelloAck:
        """Exchange the first words; ProtocolError names what differs."""
        hello = wire.Hello(self._introduction, self._me.mover.name, peer.incarnation, process_age_s())
        with suppress(asyncio.InvalidStateError):  # the call has ended already; reading says why
            await call.write(wire.hello_to_proto(hello))
        first = await call.read()
        if not isinstance(first, Response):
            raise ProtocolError("message: the stream ended before hello_ack")
        there = wire.ack_from_proto(first)
        if there.me.peer != peer:
            text = f"worker_id: {there.me.peer.worker_id} answers for {peer.worker_id}"
            raise ProtocolError(text, Refusal.INCARNATION)
        reason = refusal(self._me.layout, there.me.layout)
        if reason is not None:
            raise ProtocolError(f"layout.{reason}", Refusal.LAYOUT)
        return there

    async def _read(self, peer: Peer, call: Call) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, Response):
                return  # the end of the stream
            try:
                key, event = wire.to_sender(message)
            except ProtocolError as error:
                self._refused[error.refusal] += 1
                logger.warning("%s: refused: %s", peer.worker_id, error)
                continue
            await self._sink(PeerMessage(peer, key, event))


async def _write(stream: _Stream, call: Call) -> None:
    while True:
        message = await stream.outbound.get()
        try:
            if message is None:
                await call.done_writing()
                return
            await call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end and says why
