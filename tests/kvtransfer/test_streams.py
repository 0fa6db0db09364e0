"""Control streams between real ends over real sockets."""

import asyncio
import queue
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import numpy as np
import pytest

from pdserve.errors import Refusal
from pdserve.ids import Attempt, Generation, Incarnation, PageId, RequestId, WorkerId
from pdserve.kvlayout import KvLayout
from pdserve.kvtransfer import receiver, sender, wire
from pdserve.kvtransfer.backends.loopback import LoopbackMover
from pdserve.kvtransfer.client import HandoffClient
from pdserve.kvtransfer.mover import CopyStopped, OnStopped, Region
from pdserve.kvtransfer.peers import (
    FromReceivers,
    FromSenders,
    Party,
    PeerAlive,
    PeerAttached,
    PeerGone,
    PeerLost,
    PeerMessage,
)
from pdserve.kvtransfer.server import HandoffServicer
from pdserve.kvtransfer.session import Capsule, Commit, Grant, HandoffKey, Peer
from pdserve.proto.v1 import handoff_pb2 as handoff
from pdserve.proto.v1.handoff_pb2_grpc import HandoffServiceStub, add_HandoffServiceServicer_to_server
from pdserve.rpc import INTERNAL_MESSAGE_BYTES, RequireSecret, secret_metadata, server_options

SECRET = b"s" * 32
LAYOUT = KvLayout("w", 2, 2, 4, 4, "float32")
PREFILL = Peer(WorkerId("prefill-0"), Incarnation(1))
DECODE = Peer(WorkerId("decode-0"), Incarnation(2))
KEY = HandoffKey(RequestId(bytes(16)), Attempt(3))
GRANT = Grant(1, (PageId(4), PageId(2)), (Generation(7), Generation(8)), b"c" * 16, 4.0)
COMMIT = Commit.of(GRANT, (5, 2**64 - 1), Capsule(9, (11, 12), (0, 2)))


@dataclass
class Heard:
    """Events in the order in which they came, each waited for once."""

    queue: asyncio.Queue[FromSenders | FromReceivers] = field(default_factory=asyncio.Queue)

    async def take_in(self, event: FromSenders | FromReceivers) -> None:
        await self.queue.put(event)

    async def next(self) -> FromSenders | FromReceivers:
        async with asyncio.timeout(20):
            return await self.queue.get()


@dataclass
class End:
    party: Party
    heard: Heard


@dataclass
class Decode(End):
    servicer: HandoffServicer
    refused: Counter[Refusal]
    server: grpc.aio.Server
    address: str

    def send(self, command: wire.FromReceiver, peer: Peer = PREFILL) -> None:
        self.servicer.send(peer, KEY, command)


@dataclass
class Prefill(End):
    client: HandoffClient

    def connect(self, decode: Decode, peer: Peer = DECODE) -> None:
        self.client.connect(peer, decode.address)

    def send(self, command: wire.FromSender) -> None:
        self.client.send(DECODE, KEY, command)


def party(peer: Peer, layout: KvLayout = LAYOUT, on_stopped: OnStopped = lambda _: None) -> Party:
    region = Region.of(np.zeros((8, layout.page_bytes), np.uint8))
    return Party(peer, layout, LoopbackMover(region, on_stopped))


@asynccontextmanager
async def decode_worker(peer: Peer = DECODE) -> AsyncIterator[Decode]:
    me, heard = party(peer), Heard()
    refused: Counter[Refusal] = Counter()
    servicer = HandoffServicer(me, heard.take_in, refused)
    identify = RequireSecret(SECRET, lambda: refused.update([Refusal.SECRET]))
    server = grpc.aio.server(interceptors=[identify], options=server_options(INTERNAL_MESSAGE_BYTES))
    add_HandoffServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Decode(me, heard, servicer, refused, server, f"127.0.0.1:{port}")
    finally:
        await server.stop(None)
        me.mover.close()


@asynccontextmanager
async def prefill_worker(
    peer: Peer = PREFILL,
    *,
    layout: KvLayout = LAYOUT,
    secret: bytes = SECRET,
    on_stopped: OnStopped = lambda _: None,
) -> AsyncIterator[Prefill]:
    me, heard = party(peer, layout, on_stopped), Heard()
    async with asyncio.TaskGroup() as tasks:
        client = HandoffClient(me, secret, heard.take_in, tasks, Counter())
        try:
            yield Prefill(me, heard, client)
        finally:
            await client.close()
    me.mover.close()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Prefill, Decode]]:
    async with decode_worker() as decode, prefill_worker() as prefill:
        prefill.connect(decode)
        assert await decode.heard.next() == PeerAttached(PREFILL)
        yield prefill, decode


async def test_a_hand_off_is_spoken_of_in_order_and_unchanged() -> None:
    async with pair() as (prefill, decode):
        decode.send(receiver.SendGrant(GRANT))
        assert await prefill.heard.next() == PeerMessage(DECODE, KEY, sender.Granted(GRANT))
        prefill.send(sender.SendCommit(COMMIT))
        prefill.send(sender.SendQuiesced("late"))
        assert await decode.heard.next() == PeerMessage(PREFILL, KEY, receiver.Committed(COMMIT))
        assert await decode.heard.next() == PeerMessage(PREFILL, KEY, receiver.SenderQuiesced())
        decode.send(receiver.SendTaken())
        decode.send(receiver.SendWithdrawn("over"))
        assert await prefill.heard.next() == PeerMessage(DECODE, KEY, sender.Taken())
        assert await prefill.heard.next() == PeerMessage(DECODE, KEY, sender.Withdrawn("over"))


async def test_a_beat_reaches_every_attached_decode_worker_in_its_place_among_words() -> None:
    async with pair() as (prefill, decode):
        prefill.send(sender.SendCommit(COMMIT))
        prefill.client.beat()
        prefill.send(sender.SendQuiesced("late"))
        assert await decode.heard.next() == PeerMessage(PREFILL, KEY, receiver.Committed(COMMIT))
        assert await decode.heard.next() == PeerAlive(PREFILL)
        assert await decode.heard.next() == PeerMessage(PREFILL, KEY, receiver.SenderQuiesced())


async def test_pages_can_be_written_as_soon_as_a_grant_arrives() -> None:
    stopped: queue.SimpleQueue[CopyStopped] = queue.SimpleQueue()
    async with decode_worker() as decode, prefill_worker(on_stopped=stopped.put) as prefill:
        prefill.connect(decode)
        await decode.heard.next()
        decode.send(receiver.SendGrant(GRANT))
        await prefill.heard.next()
        prefill.party.mover.write(DECODE, (PageId(0),), (PageId(4),))
        copy = await asyncio.to_thread(stopped.get, timeout=5)
        assert (copy.digests is None, copy.reason) == (False, "")


async def test_what_is_said_before_the_stream_stands_arrives_after_the_greeting() -> None:
    async with decode_worker() as decode, prefill_worker() as prefill:
        prefill.connect(decode)
        prefill.send(sender.SendQuiesced("cancelled"))
        assert await decode.heard.next() == PeerAttached(PREFILL)
        assert await decode.heard.next() == PeerMessage(PREFILL, KEY, receiver.SenderQuiesced())


async def test_a_second_need_uses_the_stream_that_stands() -> None:
    async with pair() as (prefill, decode):
        prefill.connect(decode)
        prefill.send(sender.SendQuiesced(""))
        assert await decode.heard.next() == PeerMessage(PREFILL, KEY, receiver.SenderQuiesced())
        assert decode.servicer.attached == (PREFILL,)


async def test_closing_says_what_is_queued_and_ends_the_stream() -> None:
    async with decode_worker() as decode:
        async with prefill_worker() as prefill:
            prefill.connect(decode)
            await decode.heard.next()
            prefill.send(sender.SendQuiesced("draining"))
        assert await decode.heard.next() == PeerMessage(PREFILL, KEY, receiver.SenderQuiesced())
        assert await decode.heard.next() == PeerLost(PREFILL, "it ended its stream")
        assert decode.servicer.attached == ()


async def test_a_decode_worker_that_leaves_says_what_is_queued_and_waits_for_nobody() -> None:
    async with pair() as (prefill, decode):
        decode.send(receiver.SendTaken())
        decode.servicer.close()
        async with asyncio.timeout(10):
            await decode.server.stop(60)
        assert await prefill.heard.next() == PeerMessage(DECODE, KEY, sender.Taken())
        assert await prefill.heard.next() == PeerLost(DECODE, "it ended the stream")
        assert await decode.heard.next() == PeerLost(PREFILL, "this worker leaves")


async def test_a_stopping_decode_worker_is_lost_and_the_next_need_dials_again() -> None:
    async with prefill_worker() as prefill:
        async with decode_worker() as decode:
            prefill.connect(decode)
            await decode.heard.next()
        lost = await prefill.heard.next()
        assert isinstance(lost, PeerLost)
        async with decode_worker() as decode:
            prefill.connect(decode)
            assert await decode.heard.next() == PeerAttached(PREFILL)


async def test_nobody_listening_is_a_lost_peer_within_the_connect_timeout() -> None:
    async with prefill_worker() as prefill:
        prefill.client.connect(DECODE, "127.0.0.1:1")
        lost = await prefill.heard.next()
        assert isinstance(lost, PeerLost)
        assert "UNAVAILABLE" in lost.reason or "within 2 s" in lost.reason


async def test_a_listener_that_never_answers_is_a_lost_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        async with prefill_worker() as prefill:
            prefill.client.connect(DECODE, f"{host}:{port}")
            assert isinstance(await prefill.heard.next(), PeerLost)


async def test_a_wrong_secret_is_refused() -> None:
    async with decode_worker() as decode, prefill_worker(secret=b"x" * 32) as prefill:
        prefill.connect(decode)
        lost = await prefill.heard.next()
        assert isinstance(lost, PeerLost)
        assert "UNAUTHENTICATED" in lost.reason
        assert decode.refused == {Refusal.SECRET: 1}
        assert decode.servicer.attached == ()


async def test_another_layout_is_refused_and_named() -> None:
    async with decode_worker() as decode, prefill_worker(layout=replace(LAYOUT, page_size=8)) as prefill:
        prefill.connect(decode)
        assert await prefill.heard.next() == PeerLost(
            DECODE, "FAILED_PRECONDITION: layout.page_size: 8 != 4, and movers write whole pages alone"
        )


async def test_another_incarnation_than_the_one_meant_is_refused_and_named() -> None:
    async with decode_worker() as decode, prefill_worker() as prefill:
        prefill.connect(decode, Peer(DECODE.worker_id, Incarnation(99)))
        lost = await prefill.heard.next()
        assert isinstance(lost, PeerLost)
        assert "decode_incarnation: 0000000000000063" in lost.reason
        assert decode.refused == {Refusal.INCARNATION: 1}


async def test_another_worker_at_the_address_is_refused() -> None:
    async with decode_worker() as decode, prefill_worker() as prefill:
        prefill.connect(decode, Peer(WorkerId("decode-9"), DECODE.incarnation))
        lost = await prefill.heard.next()
        assert isinstance(lost, PeerLost)
        assert lost.reason == "worker_id: decode-0 answers for decode-9"


Change = Callable[[handoff.HandoffServiceAttachRequest], None]


@asynccontextmanager
async def raw_stream(decode: Decode, change: Change) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """Say a hello that `change` has falsified."""
    introduction = wire.Introduction(PREFILL, LAYOUT, b"m")
    hello = wire.hello_to_proto(wire.Hello(introduction, "loopback", DECODE.incarnation))
    change(hello)
    async with grpc.aio.insecure_channel(decode.address) as channel:
        call = HandoffServiceStub(channel).Attach(metadata=secret_metadata(SECRET))
        await call.write(hello)
        yield call


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: setattr(m.hello, "protocol_version", 9), "protocol_version: 9 there, 1 here"),
        (lambda m: setattr(m.hello, "worker_id", ""), "worker_id"),
        (lambda m: setattr(m.hello, "worker_id", "w" * 254), "worker_id"),
        (lambda m: setattr(m.hello, "incarnation", 0), "incarnation"),
        (lambda m: setattr(m.hello, "mover", "carrier pigeon"), "mover"),
        (lambda m: setattr(m.hello, "mover_metadata", bytes((1 << 20) + 1)), "mover_metadata"),
        (lambda m: setattr(m.hello.layout, "dtype", "int3"), "layout.dtype"),
        (lambda m: setattr(m.hello.layout, "head_dim", 0), "layout.head_dim"),
        (lambda m: m.hello.ClearField("layout"), "layout"),
        (lambda m: m.quiesced.SetInParent(), "message: quiesced before hello"),
        (lambda m: m.Clear(), "message: None before hello"),
    ],
)
async def test_a_false_hello_is_refused_and_the_field_named(change: Change, named: str) -> None:
    async with decode_worker() as decode:
        async with raw_stream(decode, change) as call:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert named in (refused.value.details() or "")
        assert decode.refused.total() == 1
        assert decode.heard.queue.empty()


def quiesced(request_id: bytes = KEY.request_id) -> handoff.HandoffServiceAttachRequest:
    name = handoff.HandoffId(request_id=request_id, attempt=KEY.attempt)
    return handoff.HandoffServiceAttachRequest(quiesced=handoff.Quiesced(handoff=name))


def commit(**changes: object) -> handoff.HandoffServiceAttachRequest:
    message = wire.from_sender(KEY, sender.SendCommit(COMMIT))
    message.commit.MergeFrom(handoff.Commit(**changes))
    return message


@pytest.mark.parametrize(
    "message",
    [
        handoff.HandoffServiceAttachRequest(),
        handoff.HandoffServiceAttachRequest(hello=handoff.Hello(worker_id="prefill-0")),
        quiesced(request_id=b"short"),
        commit(capability=b"c" * 17),
        commit(capsule=handoff.Capsule(first_tokens=[1])),
        commit(capsule=handoff.Capsule(indices=[0], first_tokens=[1])),
        handoff.HandoffServiceAttachRequest(commit=handoff.Commit(handoff=quiesced().quiesced.handoff)),
    ],
)
async def test_a_malformed_message_is_refused_and_the_stream_goes_on(
    message: handoff.HandoffServiceAttachRequest,
) -> None:
    async with decode_worker() as decode, raw_stream(decode, lambda _: None) as call:
        await call.write(message)
        await call.write(quiesced())
        assert await decode.heard.next() == PeerAttached(PREFILL)
        assert await decode.heard.next() == PeerMessage(PREFILL, KEY, receiver.SenderQuiesced())
        assert decode.refused == {Refusal.MALFORMED: 1}


async def test_a_cut_connection_is_a_lost_peer() -> None:
    async with decode_worker() as decode:
        async with raw_stream(decode, lambda _: None) as call:
            await decode.heard.next()
            call.cancel()
        assert isinstance(await decode.heard.next(), PeerLost)
        assert decode.servicer.attached == ()


LATER = Peer(PREFILL.worker_id, Incarnation(PREFILL.incarnation + 1))


async def test_a_later_process_proves_the_end_of_one_that_is_not_attached_and_that_is_not_let_in_again() -> None:
    async with decode_worker() as decode, prefill_worker() as prefill, prefill_worker(LATER) as later:
        async with raw_stream(decode, lambda _: None) as call:
            assert await decode.heard.next() == PeerAttached(PREFILL)
            call.cancel()
            assert isinstance(await decode.heard.next(), PeerLost)
        later.connect(decode)
        assert await decode.heard.next() == PeerGone(PREFILL)
        assert await decode.heard.next() == PeerAttached(LATER)
        prefill.connect(decode)
        lost = await prefill.heard.next()
        assert isinstance(lost, PeerLost)
        assert "has a successor" in lost.reason
        assert decode.servicer.attached == (LATER,)


async def test_a_process_that_is_attached_has_not_ended_whoever_follows_it() -> None:
    async with pair() as (prefill, decode), prefill_worker(LATER) as later:
        later.connect(decode)
        assert await decode.heard.next() == PeerLost(PREFILL, "a later process of its name attached")
        assert await decode.heard.next() == PeerAttached(LATER)
        assert isinstance(await prefill.heard.next(), PeerLost)
        prefill.connect(decode)
        assert isinstance(await prefill.heard.next(), PeerLost)
        assert decode.refused == {Refusal.INCARNATION: 1}
        assert decode.servicer.attached == (LATER,)


async def test_an_earlier_process_is_not_let_in_after_a_later_one() -> None:
    async with decode_worker() as decode, prefill_worker() as prefill, prefill_worker(LATER) as later:
        later.connect(decode)
        assert await decode.heard.next() == PeerAttached(LATER)
        prefill.connect(decode)
        lost = await prefill.heard.next()
        assert isinstance(lost, PeerLost)
        assert "started before" in lost.reason
        assert decode.refused == {Refusal.INCARNATION: 1}
        assert decode.servicer.attached == (LATER,)
        assert decode.heard.queue.empty()


async def test_the_same_process_attaching_anew_takes_the_place_of_its_old_stream() -> None:
    async with decode_worker() as decode, raw_stream(decode, lambda _: None) as old:
        assert await decode.heard.next() == PeerAttached(PREFILL)
        async with raw_stream(decode, lambda _: None) as new:
            assert await decode.heard.next() == PeerLost(PREFILL, "it attached anew")
            assert await decode.heard.next() == PeerAttached(PREFILL)
            await old.read()  # the greeting
            assert await old.read() is grpc.aio.EOF
            decode.send(receiver.SendTaken())
            await new.read()
            assert (await new.read()).HasField("taken")


async def test_a_peer_that_does_not_read_is_lost_and_others_are_not() -> None:
    async with pair() as (prefill, decode):
        other = Peer(WorkerId("prefill-1"), Incarnation(5))
        async with prefill_worker(other) as second:
            second.connect(decode)
            assert await decode.heard.next() == PeerAttached(other)
            for _ in range(5000):
                decode.send(receiver.SendTaken())
            lost = await decode.heard.next()
            assert isinstance(lost, PeerLost)
            assert lost.peer == PREFILL
            assert "does not read" in lost.reason
            assert decode.servicer.attached == (other,)
        assert prefill.client is not None


async def test_a_forgotten_prefill_worker_is_cut_off() -> None:
    async with pair() as (prefill, decode):
        decode.servicer.forget(PREFILL)
        assert isinstance(await prefill.heard.next(), PeerLost)
        assert await decode.heard.next() == PeerLost(PREFILL, "its process has ended")


async def test_a_forgotten_decode_worker_is_cut_off() -> None:
    async with pair() as (prefill, decode):
        prefill.client.forget(DECODE)
        assert await prefill.heard.next() == PeerLost(DECODE, "its process has ended")
        assert isinstance(await decode.heard.next(), PeerLost)


async def test_a_decode_worker_forgotten_before_it_was_dialled_can_be_dialled_later() -> None:
    async with decode_worker() as decode, prefill_worker() as prefill:
        prefill.connect(decode)
        prefill.client.forget(DECODE)
        prefill.connect(decode)
        assert await decode.heard.next() == PeerAttached(PREFILL)
