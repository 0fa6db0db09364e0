"""The sender's end of the hand-off streams, one to each receiver, around a `dialling.Dialling`."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from pdserve.base.clock import process_age_s
from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer import dialling, wire
from pdserve.kvtransfer.conversion import conversion_between
from pdserve.kvtransfer.dialling import CONNECT_TIMEOUT_S, Dial, DialId, Dialling
from pdserve.kvtransfer.doors import OutgoingEvent, ReceiverAttached, ReceiverLost, ReceiverMessage, Sink
from pdserve.kvtransfer.ranked_mover import AnyMover
from pdserve.kvtransfer.session import FromSender, Hello, HelloAck, Introduction
from pdserve.kvtransfer.wire import Request, Response
from pdserve.net.certificates import Part
from pdserve.net.coalescing import write_all
from pdserve.net.credentials import Credentials
from pdserve.net.rpc import identify
from pdserve.proto.v1.handoff_pb2_grpc import HandoffServiceStub

logger = logging.getLogger(__name__)

ATTACH = "/pdserve.v1.HandoffService/Attach"
CLOSE_TIMEOUT_S = 2.0
MAX_QUEUED = 4096  # messages to one peer

Call = grpc.aio.StreamStreamCall[Request, Response]


@dataclass(slots=True, eq=False)
class _Stream:
    """None in the queue: write nothing more."""

    task: asyncio.Task[None]
    outbound: asyncio.Queue[Request | None] = field(default_factory=asyncio.Queue)


class HandoffClient:
    """Dials on first need, and again on the next need after a stream was lost."""

    def __init__(
        self,
        me: Introduction,
        mover: AnyMover,
        credentials: Credentials,
        sink: Sink[OutgoingEvent],
        tasks: asyncio.TaskGroup,
        refused: Counter[PeerFault],
    ) -> None:
        """`refused` counts what is refused here, beside what its owner counts."""
        self._me = me
        self._mover = mover
        self._credentials = credentials
        self._sink = sink
        self._tasks = tasks
        self._refused = refused
        self._dialling = Dialling(me)
        self._streams: dict[DialId, _Stream] = {}
        self._is_closing = False

    def connect(self, peer: Peer, address: str) -> None:
        """Have a stream to a receiver; ReceiverLost is reported if it cannot be had."""
        self._perform(self._dialling.connect(peer, address))

    def send(self, peer: Peer, key: AttemptKey, message: FromSender) -> None:
        """Queue a message. Without a stream it is dropped; a full queue ends the stream."""
        self._perform(self._dialling.send(peer, key, message))

    def forget(self, peer: Peer) -> None:
        """End the stream to a process that is known to have ended."""
        self._perform(self._dialling.forget(peer))

    def beat(self) -> None:
        """Send every receiver a heartbeat: the engine loop of this process goes on."""
        for dial in self._dialling.attached:
            self._write(dial, wire.ALIVE)

    async def close(self) -> None:
        """Write what is queued, then end every stream and dial no more."""
        self._is_closing = True
        self._perform(self._dialling.leave())
        tasks = [stream.task for stream in self._streams.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()

    def _perform(self, commands: Iterable[dialling.Command]) -> None:
        for command in commands:
            match command:
                case Dial(dial, peer):
                    task = self._tasks.create_task(self._serve(command), name=f"handoff {peer.worker_id}")
                    self._streams[dial] = _Stream(task)
                    asyncio.get_running_loop().call_later(CONNECT_TIMEOUT_S, self._time_out, dial)
                case dialling.Send(dial, key, message):
                    self._write(dial, wire.from_sender(key, message))
                case dialling.Finish(dial):
                    self._write(dial, None)
                case dialling.Close(dial):
                    self._streams.pop(dial).task.cancel()
                case ReceiverLost(peer, reason):
                    logger.log(logging.INFO if self._is_closing else logging.WARNING, "%s: %s", peer.worker_id, reason)
                    self._sink.put(command)
                case ReceiverAttached(peer):
                    logger.info("attached to %s", peer.worker_id)
                    self._sink.put(command)

    def _time_out(self, dial: DialId) -> None:
        self._perform(self._dialling.time_out(dial))

    def _write(self, dial: DialId, message: Request | None) -> None:
        stream = self._streams.get(dial)
        if stream is None:
            return
        if stream.outbound.qsize() >= MAX_QUEUED:
            self._perform(self._dialling.end(dial, f"it does not read: {stream.outbound.qsize()} messages wait"))
            return
        stream.outbound.put_nowait(message)

    async def _serve(self, dial: Dial) -> None:
        """Serve a stream to its end, and report why it has ended."""
        outbound, reason = self._streams[dial.dial].outbound, "it ended the stream"
        try:
            async with self._credentials.channel(dial.address, Part.WORKER) as channel:
                proof = await identify(channel, self._credentials.secret, ATTACH)
                call: Call = HandoffServiceStub(channel).Attach(metadata=proof)
                try:
                    await self._read(dial, call, outbound)
                finally:
                    call.cancel()
        except ProtocolError as error:
            self._refused[error.refusal] += 1
            reason = str(error)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        self._perform(self._dialling.end(dial.dial, reason))

    async def _read(self, dial: Dial, call: Call, outbound: asyncio.Queue[Request | None]) -> None:
        """Greet a receiver, then hand on what it says: reading on waits until that is done."""
        ack = await self._greet(call, dial.peer)
        self._dialling.answer(dial.dial, ack)
        conversion = conversion_between(self._me.layout, ack.me.layout)
        await asyncio.to_thread(self._mover.attach, dial.peer, ack.mover_metadata, conversion)
        self._perform(self._dialling.attach(dial.dial))
        writer = self._tasks.create_task(write_all(outbound, call), name=f"handoff {dial.peer.worker_id} writer")
        try:
            while isinstance(message := await call.read(), Response):
                for each in (message, *message.more):
                    try:
                        event = ReceiverMessage(dial.peer, *wire.to_sender(each))
                    except ProtocolError as error:
                        self._refused[error.refusal] += 1
                        logger.warning("%s: refused: %s", dial.peer.worker_id, error)
                        continue
                    await self._sink.offer(event)
        finally:
            writer.cancel()

    async def _greet(self, call: Call, peer: Peer) -> HelloAck:
        hello = Hello(self._me, self._mover.name, peer.incarnation, process_age_s())
        with suppress(asyncio.InvalidStateError):  # the call has ended already; reading says why
            await call.write(wire.hello_to_proto(hello))
        first = await call.read()
        if not isinstance(first, Response):
            raise ProtocolError("message: the stream ended before hello_ack")
        return wire.ack_from_proto(first)
