"""Control streams between real ends over real sockets."""

import asyncio
import queue
import socket

from stream_ends import COMMIT, DECODE, GRANT, KEY, LANDED, PREFILL, decode_worker, pair, prefill_worker, raw_stream

from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer import wire
from pdserve.kvtransfer.doors import (
    ReceiverAttached,
    ReceiverLost,
    ReceiverMessage,
    SenderAlive,
    SenderAttached,
    SenderLost,
    SenderMessage,
)
from pdserve.kvtransfer.session import Quiesced, Taken, Withdrawn

HANDOFF = AttemptKey(RequestId(bytes(16)), Attempt(0))


async def test_a_hand_off_is_spoken_of_in_order_and_unchanged() -> None:
    async with pair() as (prefill, decode):
        decode.send(GRANT)
        assert await prefill.heard.next() == ReceiverMessage(DECODE, KEY, GRANT)
        prefill.send(LANDED)
        prefill.send(COMMIT)
        prefill.send(Quiesced("late"))
        assert await decode.heard.next() == SenderMessage(PREFILL, KEY, LANDED)
        assert await decode.heard.next() == SenderMessage(PREFILL, KEY, COMMIT)
        assert await decode.heard.next() == SenderMessage(PREFILL, KEY, Quiesced("late"))
        decode.send(Taken())
        decode.send(Withdrawn("over"))
        assert await prefill.heard.next() == ReceiverMessage(DECODE, KEY, Taken())
        assert await prefill.heard.next() == ReceiverMessage(DECODE, KEY, Withdrawn("over"))


async def test_a_beat_reaches_every_attached_decode_worker_in_its_place_among_words() -> None:
    async with pair() as (prefill, decode):
        prefill.send(COMMIT)
        prefill.client.beat()
        prefill.send(Quiesced("late"))
        assert await decode.heard.next() == SenderMessage(PREFILL, KEY, COMMIT)
        assert await decode.heard.next() == SenderAlive(PREFILL)
        assert await decode.heard.next() == SenderMessage(PREFILL, KEY, Quiesced("late"))


async def test_one_that_is_malformed_costs_none_of_those_that_come_with_it() -> None:
    async with decode_worker() as decode, raw_stream(decode, lambda _: None) as call:
        assert await decode.heard.next() == SenderAttached(PREFILL)
        decode.send(GRANT)
        assert not (await call.read()).more, "the answer to hello, which every stream gets, stands alone"
        assert (await call.read()).HasField("grant")
        late = wire.from_sender(KEY, Quiesced("late"))
        await call.write(wire.Request(alive=wire.ALIVE.alive, more=[wire.Request(), late]))
        assert await decode.heard.next() == SenderAlive(PREFILL)
        assert await decode.heard.next() == SenderMessage(PREFILL, KEY, Quiesced("late"))
        assert decode.refused.total() == 1
    async with pair() as (prefill, decode):
        (stream,) = decode.servicer._streams.values()
        taken = wire.from_receiver(KEY, Taken())
        stream.outbound.put_nowait(wire.Response(more=[wire.Response(), taken]))
        assert await prefill.heard.next() == ReceiverMessage(DECODE, KEY, Taken())


async def test_pages_can_be_written_as_soon_as_a_grant_arrives() -> None:
    stopped: queue.SimpleQueue[ReceiverMessage] = queue.SimpleQueue()
    async with decode_worker() as decode, prefill_worker(on_stopped=stopped.put) as prefill:
        prefill.connect(decode)
        await decode.heard.next()
        decode.send(GRANT)
        await prefill.heard.next()
        prefill.mover.write(DECODE, HANDOFF, (PageId(0),), (PageId(4),))
        copy = (await asyncio.to_thread(stopped.get, timeout=5)).event
        assert (copy.digests is None, copy.reason) == (False, "")


async def test_what_is_said_before_the_stream_stands_arrives_after_the_greeting() -> None:
    async with decode_worker() as decode, prefill_worker() as prefill:
        prefill.connect(decode)
        prefill.send(Quiesced("cancelled"))
        assert await decode.heard.next() == SenderAttached(PREFILL)
        assert await decode.heard.next() == SenderMessage(PREFILL, KEY, Quiesced("cancelled"))


async def test_a_second_need_uses_the_stream_that_stands() -> None:
    async with pair() as (prefill, decode):
        prefill.connect(decode)
        prefill.send(Quiesced(""))
        assert await decode.heard.next() == SenderMessage(PREFILL, KEY, Quiesced(""))
        assert decode.servicer.attached == (PREFILL,)


async def test_closing_says_what_is_queued_and_ends_the_stream() -> None:
    async with decode_worker() as decode:
        async with prefill_worker() as prefill:
            prefill.connect(decode)
            await decode.heard.next()
            prefill.send(Quiesced("draining"))
        assert await decode.heard.next() == SenderMessage(PREFILL, KEY, Quiesced("draining"))
        assert await decode.heard.next() == SenderLost(PREFILL, "it ended its stream")
        assert decode.servicer.attached == ()


async def test_a_decode_worker_that_leaves_says_what_is_queued_and_waits_for_nobody() -> None:
    async with pair() as (prefill, decode):
        decode.send(Taken())
        decode.servicer.close()
        async with asyncio.timeout(10):
            await decode.server.stop(60)
        assert await prefill.heard.next() == ReceiverMessage(DECODE, KEY, Taken())
        assert await prefill.heard.next() == ReceiverLost(DECODE, "it ended the stream")
        assert await decode.heard.next() == SenderLost(PREFILL, "this worker leaves")


async def test_a_stopping_decode_worker_is_lost_and_the_next_need_dials_again() -> None:
    async with prefill_worker() as prefill:
        async with decode_worker() as decode:
            prefill.connect(decode)
            assert await prefill.heard.next() == ReceiverAttached(DECODE)
        lost = await prefill.heard.next()
        assert isinstance(lost, ReceiverLost)
        async with decode_worker() as decode:
            prefill.connect(decode)
            assert await decode.heard.next() == SenderAttached(PREFILL)


async def test_nobody_listening_is_a_lost_peer_within_the_connect_timeout() -> None:
    async with prefill_worker() as prefill:
        prefill.client.connect(DECODE, "127.0.0.1:1")
        reason = await prefill.why_lost()
        assert "UNAVAILABLE" in reason or "within 2 s" in reason


async def test_a_listener_that_never_answers_is_a_lost_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        async with prefill_worker() as prefill:
            prefill.client.connect(DECODE, f"{host}:{port}")
            assert await prefill.why_lost()


async def test_a_cut_connection_is_a_lost_peer() -> None:
    async with decode_worker() as decode:
        async with raw_stream(decode, lambda _: None) as call:
            await decode.heard.next()
            call.cancel()
        assert isinstance(await decode.heard.next(), SenderLost)
        assert decode.servicer.attached == ()


async def test_a_peer_that_does_not_read_is_lost_and_others_are_not() -> None:
    async with pair() as (prefill, decode):
        other = Peer(WorkerId("prefill-1"), Incarnation(5))
        async with prefill_worker(other) as second:
            second.connect(decode)
            assert await decode.heard.next() == SenderAttached(other)
            for _ in range(5000):
                decode.send(Taken())
            lost = await decode.heard.next()
            assert isinstance(lost, SenderLost)
            assert lost.peer == PREFILL
            assert "does not read" in lost.reason
            assert decode.servicer.attached == (other,)
        assert prefill.client is not None


async def test_a_forgotten_prefill_worker_is_cut_off() -> None:
    async with pair() as (prefill, decode):
        decode.servicer.forget(PREFILL)
        assert await prefill.why_lost()
        assert await decode.heard.next() == SenderLost(PREFILL, "its process has ended")


async def test_a_forgotten_decode_worker_is_cut_off() -> None:
    async with pair() as (prefill, decode):
        prefill.client.forget(DECODE)
        assert await prefill.heard.next() == ReceiverLost(DECODE, "its process has ended")
        assert isinstance(await decode.heard.next(), SenderLost)


async def test_a_decode_worker_forgotten_before_it_was_dialled_can_be_dialled_later() -> None:
    async with decode_worker() as decode, prefill_worker() as prefill:
        prefill.connect(decode)
        prefill.client.forget(DECODE)
        prefill.connect(decode)
        assert await decode.heard.next() == SenderAttached(PREFILL)
