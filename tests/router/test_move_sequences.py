"""An operator asks a real router to move what decodes on a worker."""

import grpc
import pytest
from router_fakes import TOKENIZER, RouterUnderTest, StartRouter, tokens_in, tokens_of

from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.link import layout_to_proto

PROMPT = TOKENIZER.encode("hello", add_special=False)


async def move(router: RouterUnderTest, worker: str, target: str = "", most: int = 0) -> int:
    request = admin.MoveSequencesRequest(worker_id=worker, target_worker_id=target, max_sequences=most)
    reply = await router.admin.MoveSequences(request, metadata=await router.proof("MoveSequences"))
    return reply.num_sequences


async def test_an_answer_goes_on_where_it_is_moved_to(start_router: StartRouter) -> None:
    router = await start_router()
    _, source = await router.pair()
    source.max_step = 3
    call = router.generate(text="hello", max_tokens=60)
    early = [await call.read()]
    while len(tokens_in(early)) < 4:
        early.append(await call.read())
    target = await router.worker(link.ROLE_DECODE, "d1")
    assert await move(router, "d0", "d1", 1) == 1
    replies = early
    while (reply := await call.read()) is not grpc.aio.EOF:
        replies.append(reply)
    assert tokens_in(replies) == tokens_of(PROMPT, 60)
    (asked,), (placed,) = source.moves, target.decodes[:1]
    assert (asked.attempt, asked.new_attempt, asked.index, asked.target.worker_id) == (0, 1, 0, "d1")
    assert asked.num_tokens == len(placed.spec.token_ids) // 4
    assert (placed.spec.attempt, placed.source.worker_id, list(placed.spec.indices)) == (1, "d0", [])
    assert placed.extra_tokens > 0
    ledger = replies[-1].ledger
    assert [(moved.source, moved.target, moved.num_tokens) for moved in ledger.moves] == [("d0", "d1", 4)]
    assert (ledger.attempts, ledger.decode_worker) == (1, "d1")
    await router.until_status(lambda status: dict(status.moves) == {"done": 1})


async def test_what_cannot_move_is_refused_by_the_name_of_the_field(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    other = layout_to_proto(KvLayout("w", 1, 1, 8, 32, "float32"))
    await router.worker(link.ROLE_DECODE, "d2", layout=other)
    leaving = await router.worker(link.ROLE_DECODE, "d3")
    leaving.is_asked_to_drain = True
    await router.until_status(lambda status: any(worker.unroutable == "it is draining" for worker in status.workers))
    for names, code, text in [
        (("nobody",), grpc.StatusCode.NOT_FOUND, "worker_id: 'nobody' is not attached"),
        (("d0", "nobody"), grpc.StatusCode.NOT_FOUND, "target_worker_id: 'nobody' is not attached"),
        (("d0", "d0"), grpc.StatusCode.FAILED_PRECONDITION, "target_worker_id: d0 has them already"),
        (("d0", "p0"), grpc.StatusCode.FAILED_PRECONDITION, "target_worker_id: p0 is a prefill worker"),
        (("d0", "d3"), grpc.StatusCode.FAILED_PRECONDITION, "target_worker_id: d3 takes nothing: it is draining"),
        (("d0", "d2"), grpc.StatusCode.FAILED_PRECONDITION, "target_worker_id: d2 does not fit d0: "),
        (
            ("d3", "d0"),
            grpc.StatusCode.FAILED_PRECONDITION,
            "target_worker_id: d3 is draining: all that it",
        ),
        (("p0", "d0"), grpc.StatusCode.FAILED_PRECONDITION, "target_worker_id: p0 is a prefill worker: all that it"),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await move(router, *names)
        assert caught.value.code() is code
        assert (caught.value.details() or "").startswith(text)
    assert await move(router, "d0", "") == 0
