"""The two ends of a hand-off stream, as real servers and clients on real sockets."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import grpc
import numpy as np
from loopback import loopback_mover

from pdserve.base.errors import PeerFault
from pdserve.base.ids import Attempt, AttemptKey, Generation, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer import wire
from pdserve.kvtransfer.client import ATTACH, HandoffClient
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.doors import IncomingEvent, OutgoingEvent, ReceiverAttached, ReceiverLost, SenderAttached
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.server import HandoffServicer
from pdserve.kvtransfer.session import (
    Capsule,
    Commit,
    FromReceiver,
    FromSender,
    Grant,
    Hello,
    Introduction,
    PagesLanded,
    Tail,
)
from pdserve.net.credentials import Credentials
from pdserve.net.rpc import INTERNAL_MESSAGE_BYTES, RequireSecret, identify, server_options
from pdserve.proto.v1 import handoff_pb2 as handoff
from pdserve.proto.v1.handoff_pb2_grpc import HandoffServiceStub, add_HandoffServiceServicer_to_server
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.sampling import SampledToken, TokenLogprobs

SECRET = b"s" * 32
LAYOUT = KvLayout("w", 2, 2, 4, 4, "float32")
PREFILL = Peer(WorkerId("prefill-0"), Incarnation(1))
DECODE = Peer(WorkerId("decode-0"), Incarnation(2))
LATER = Peer(PREFILL.worker_id, Incarnation(PREFILL.incarnation + 1))
KEY = AttemptKey(RequestId(bytes(16)), Attempt(3))
GRANT = Grant(1, (PageId(4), PageId(2)), (Generation(7), Generation(8)), b"c" * 16, 4.0)
TAILS = (
    Tail(0, (SampledToken(11), SampledToken(13))),
    Tail(2, (SampledToken(12, TokenLogprobs(-0.5, ((12, -0.5), (3, -1.25)))),)),
)
COMMIT = Commit(GRANT.capability, Capsule(9, TAILS))
LANDED = PagesLanded((5, 2**64 - 1))


ReportT = TypeVar("ReportT")


@dataclass
class Heard(Generic[ReportT]):
    """Reports in the order in which they came, each waited for once."""

    queue: asyncio.Queue[ReportT] = field(default_factory=asyncio.Queue)

    def put(self, report: ReportT) -> None:
        self.queue.put_nowait(report)

    async def offer(self, report: ReportT) -> None:
        await self.queue.put(report)

    async def next(self) -> ReportT:
        async with asyncio.timeout(20):
            return await self.queue.get()


@dataclass
class End:
    me: Introduction
    mover: Mover
    heard: Heard[IncomingEvent | OutgoingEvent]


@dataclass
class Decode(End):
    servicer: HandoffServicer
    refused: Counter[PeerFault]
    server: grpc.aio.Server
    address: str

    def send(self, command: FromReceiver, peer: Peer = PREFILL) -> None:
        self.servicer.send(peer, KEY, command)


@dataclass
class Prefill(End):
    client: HandoffClient

    def connect(self, decode: Decode, peer: Peer = DECODE) -> None:
        self.client.connect(peer, decode.address)

    def send(self, command: FromSender) -> None:
        self.client.send(DECODE, KEY, command)

    async def why_lost(self) -> str:
        """Return why the decode worker that it hears of next is lost."""
        lost = await self.heard.next()
        assert isinstance(lost, ReceiverLost)
        return lost.reason


def new_mover(layout: KvLayout = LAYOUT, on_stopped: OnStopped = lambda _: None) -> Mover:
    return loopback_mover(Region.of(np.zeros((8, layout.page_bytes), np.uint8)), on_stopped)


@asynccontextmanager
async def decode_worker(peer: Peer = DECODE) -> AsyncIterator[Decode]:
    me, mover, heard = Introduction(peer, LAYOUT), new_mover(), Heard[IncomingEvent | OutgoingEvent]()
    refused: Counter[PeerFault] = Counter()
    identify = RequireSecret(SECRET, lambda: refused.update([PeerFault.SECRET]))
    server = grpc.aio.server(interceptors=[identify], options=server_options(INTERNAL_MESSAGE_BYTES))
    try:
        servicer = HandoffServicer(me, mover, heard, refused)
        add_HandoffServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield Decode(me, mover, heard, servicer, refused, server, f"127.0.0.1:{port}")
        servicer.close()
    finally:
        await server.stop(None)
        mover.close()


@asynccontextmanager
async def prefill_worker(
    peer: Peer = PREFILL, *, layout: KvLayout = LAYOUT, secret: bytes = SECRET, on_stopped: OnStopped = lambda _: None
) -> AsyncIterator[Prefill]:
    me, mover = Introduction(peer, layout), new_mover(layout, on_stopped)
    heard = Heard[IncomingEvent | OutgoingEvent]()
    async with asyncio.TaskGroup() as tasks:
        client = HandoffClient(me, mover, Credentials(secret), heard, tasks, Counter())
        try:
            yield Prefill(me, mover, heard, client)
        finally:
            await client.close()
    mover.close()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Prefill, Decode]]:
    async with decode_worker() as decode, prefill_worker() as prefill:
        prefill.connect(decode)
        assert await decode.heard.next() == SenderAttached(PREFILL)
        assert await prefill.heard.next() == ReceiverAttached(DECODE)
        yield prefill, decode


Change = Callable[[handoff.HandoffServiceAttachRequest], None]


@asynccontextmanager
async def raw_stream(decode: Decode, change: Change) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """Say a hello that `change` has falsified."""
    introduction = Introduction(PREFILL, LAYOUT)
    hello = wire.hello_to_proto(Hello(introduction, "loopback", DECODE.incarnation, 0.0))
    change(hello)
    async with grpc.aio.insecure_channel(decode.address) as channel:
        call = HandoffServiceStub(channel).Attach(metadata=await identify(channel, SECRET, ATTACH))
        await call.write(hello)
        yield call
