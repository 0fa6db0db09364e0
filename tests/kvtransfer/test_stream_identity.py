"""Whom the ends of a hand-off stream let in, and what a false or malformed word costs."""

from dataclasses import replace

import grpc
import pytest
from stream_ends import COMMIT, DECODE, KEY, LATER, LAYOUT, PREFILL, Change, decode_worker, prefill_worker, raw_stream

from pdserve.base import processes
from pdserve.base.clock import VirtualClock
from pdserve.base.errors import PeerFault
from pdserve.base.ids import PROTOCOL_VERSION, Incarnation, Peer, WorkerId
from pdserve.kvtransfer import wire
from pdserve.kvtransfer.doors import PeerGone, ReceiverLost, SenderAttached, SenderLost, SenderMessage
from pdserve.kvtransfer.session import Quiesced, Taken
from pdserve.proto.v1 import handoff_pb2 as handoff
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.sampling import MAX_LOGPROBS


async def test_a_wrong_secret_is_refused() -> None:
    async with decode_worker() as decode, prefill_worker(secret=b"x" * 32) as prefill:
        prefill.connect(decode)
        assert "UNAUTHENTICATED" in await prefill.why_lost()
        assert decode.refused == {PeerFault.SECRET: 1}
        assert decode.servicer.attached == ()


async def test_another_layout_is_refused_and_named() -> None:
    async with decode_worker() as decode, prefill_worker(layout=replace(LAYOUT, page_size=8)) as prefill:
        prefill.connect(decode)
        assert await prefill.heard.next() == ReceiverLost(DECODE, "FAILED_PRECONDITION: layout.page_size: 8 != 4")


async def test_another_incarnation_than_the_one_meant_is_refused_and_named() -> None:
    async with decode_worker() as decode, prefill_worker() as prefill:
        prefill.connect(decode, Peer(DECODE.worker_id, Incarnation(99)))
        assert "decode_incarnation: 0000000000000063" in await prefill.why_lost()
        assert decode.refused == {PeerFault.INCARNATION: 1}


async def test_another_worker_at_the_address_is_refused() -> None:
    async with decode_worker() as decode, prefill_worker() as prefill:
        prefill.connect(decode, Peer(WorkerId("decode-9"), DECODE.incarnation))
        assert await prefill.why_lost() == "worker_id: decode-0 answers for decode-9"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: setattr(m.hello, "protocol_version", 99), f"protocol_version: 99 there, {PROTOCOL_VERSION} here"),
        (lambda m: setattr(m.hello, "worker_id", ""), "worker_id"),
        (lambda m: setattr(m.hello, "worker_id", "w" * 129), "worker_id"),
        (lambda m: setattr(m.hello, "incarnation", 0), "incarnation"),
        (lambda m: setattr(m.hello, "mover", "carrier pigeon"), "mover"),
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


LOGPROBS = inference.TokenLogprobs(chosen=-1)
TOO_MANY = inference.TokenLogprobs(chosen=-1, top=[inference.TokenLogprob()] * (MAX_LOGPROBS + 1))


def quiesced(request_id: bytes = KEY.request_id) -> handoff.HandoffServiceAttachRequest:
    name = handoff.HandoffId(request_id=request_id, attempt=KEY.attempt)
    return handoff.HandoffServiceAttachRequest(quiesced=handoff.Quiesced(handoff=name))


def commit(**changes: object) -> handoff.HandoffServiceAttachRequest:
    message = wire.from_sender(KEY, COMMIT)
    message.commit.MergeFrom(handoff.Commit(**changes))
    return message


@pytest.mark.parametrize(
    "message",
    [
        handoff.HandoffServiceAttachRequest(),
        handoff.HandoffServiceAttachRequest(hello=handoff.Hello(worker_id="prefill-0")),
        quiesced(request_id=b"short"),
        commit(capability=b"c" * 17),
        commit(capsule=handoff.Capsule(tails=[handoff.Tail(index=1)])),
        commit(capsule=handoff.Capsule(tails=[handoff.Tail(index=0, token_ids=[1])])),
        commit(capsule=handoff.Capsule(tails=[handoff.Tail(index=1, token_ids=[1, 2], logprobs=[LOGPROBS])])),
        commit(capsule=handoff.Capsule(tails=[handoff.Tail(index=1, token_ids=[1], logprobs=[TOO_MANY])])),
        commit(capsule=handoff.Capsule(tails=[handoff.Tail(index=1, token_ids=[1] * (wire.MAX_TAIL_TOKENS + 1))])),
        commit(capsule=handoff.Capsule(tails=[handoff.Tail(index=i, token_ids=[1]) for i in range(3, 66)])),
        handoff.HandoffServiceAttachRequest(commit=handoff.Commit(handoff=quiesced().quiesced.handoff)),
        handoff.HandoffServiceAttachRequest(landed=handoff.Landed(handoff=quiesced().quiesced.handoff)),
        handoff.HandoffServiceAttachRequest(landed=handoff.Landed(digests=[1])),
    ],
)
async def test_a_malformed_message_is_refused_and_the_stream_goes_on(
    message: handoff.HandoffServiceAttachRequest,
) -> None:
    async with decode_worker() as decode, raw_stream(decode, lambda _: None) as call:
        await call.write(message)
        await call.write(quiesced())
        assert await decode.heard.next() == SenderAttached(PREFILL)
        assert await decode.heard.next() == SenderMessage(PREFILL, KEY, Quiesced(""))
        assert decode.refused == {PeerFault.MALFORMED: 1}


async def test_a_later_process_proves_the_end_of_one_not_heard_since_it_started_and_that_is_not_let_in_again() -> None:
    async with decode_worker() as decode, prefill_worker() as prefill:
        async with raw_stream(decode, lambda _: None):
            assert await decode.heard.next() == SenderAttached(PREFILL)
        assert isinstance(await decode.heard.next(), SenderLost)
        async with raw_stream(decode, lambda m: setattr(m.hello, "incarnation", LATER.incarnation)):
            news = [await decode.heard.next() for _ in range(2)]
            assert set(news) == {PeerGone(PREFILL), SenderAttached(LATER)}
            prefill.connect(decode)
            assert "known to have ended" in await prefill.why_lost()
            assert decode.servicer.attached == (LATER,)


async def test_the_end_of_a_process_is_reported_before_the_stream_that_proves_it_attaches() -> None:
    async with decode_worker() as decode:
        async with raw_stream(decode, lambda _: None):
            assert await decode.heard.next() == SenderAttached(PREFILL)
        assert isinstance(await decode.heard.next(), SenderLost)
        async with raw_stream(decode, be_later) as call:
            assert await decode.heard.next() == PeerGone(PREFILL)
            call.cancel()
        assert await decode.heard.next() == SenderAttached(LATER)
        assert isinstance(await decode.heard.next(), SenderLost)


def be_later(message: handoff.HandoffServiceAttachRequest) -> None:
    message.hello.incarnation = LATER.incarnation


async def test_the_last_processes_of_the_workers_heard_last_are_remembered_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "MAX_NAMES", 2)
    names = [WorkerId(f"prefill-{i}") for i in range(3)]
    async with decode_worker() as decode:
        for name in names:
            async with raw_stream(decode, introduce(name, 5)):
                assert await decode.heard.next() == SenderAttached(Peer(name, Incarnation(5)))
            assert isinstance(await decode.heard.next(), SenderLost)
        for name in names[1:]:
            async with raw_stream(decode, introduce(name, 4)) as refused:
                assert "a later process" in await refused.details()
        async with raw_stream(decode, introduce(names[0], 4)):
            assert await decode.heard.next() == SenderAttached(Peer(names[0], Incarnation(4)))


def introduce(name: WorkerId, incarnation: int) -> Change:
    def change(message: handoff.HandoffServiceAttachRequest) -> None:
        message.hello.worker_id, message.hello.incarnation = name, incarnation

    return change


async def test_a_process_of_which_something_malformed_was_heard_after_its_successor_started_has_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = VirtualClock()
    async with decode_worker() as decode:
        monkeypatch.setattr(decode.servicer, "_clock", clock)
        async with raw_stream(decode, lambda _: None) as call:
            assert await decode.heard.next() == SenderAttached(PREFILL)
            clock.advance(1.0)
            await call.write(handoff.HandoffServiceAttachRequest())
            await call.done_writing()
            assert isinstance(await decode.heard.next(), SenderLost)
        assert decode.refused == {PeerFault.MALFORMED: 1}

        def follow(message: handoff.HandoffServiceAttachRequest) -> None:
            """Have started after the first process attached, and before that was heard of it."""
            be_later(message)
            message.hello.age_ms = 500

        async with raw_stream(decode, follow):
            assert await decode.heard.next() == SenderAttached(LATER)


async def test_the_same_process_attaching_anew_takes_the_place_of_its_old_stream() -> None:
    async with decode_worker() as decode, raw_stream(decode, lambda _: None) as old:
        assert await decode.heard.next() == SenderAttached(PREFILL)
        async with raw_stream(decode, lambda _: None) as new:
            assert await decode.heard.next() == SenderLost(PREFILL, "it attached anew")
            assert await decode.heard.next() == SenderAttached(PREFILL)
            await old.read()  # the greeting
            assert await old.read() is grpc.aio.EOF
            decode.send(Taken())
            await new.read()
            assert (await new.read()).HasField("taken")
