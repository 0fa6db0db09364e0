"""Workers come, go, fail and misbehave on real streams; clients see one answer or one typed error."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from router_fakes import (
    LAYOUT,
    TOKENIZER,
    FakeWorker,
    RouterUnderTest,
    StartRouter,
    collect,
    error_of,
    token_ids_of,
    tokens_in,
    tokens_of,
)

from pdserve.net.rpc import DISMISSED_STATUS
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import KvGroup, KvLayout
from pdserve.protocol.link import layout_to_proto
from pdserve.router import admin as endpoint

PROMPT = TOKENIZER.encode("hello", add_special=False)


async def spare_decode(router: RouterUnderTest) -> FakeWorker:
    decode = await router.worker(link.ROLE_DECODE, "d1")
    await router.until_status(lambda status: sum(not w.unroutable for w in status.workers) == 3)
    return decode


@pytest.mark.parametrize("n", [1, 3])
async def test_a_decode_worker_lost_in_mid_answer_costs_no_token(start_router: StartRouter, n: int) -> None:
    router = await start_router()
    _, first = await router.pair()
    first.max_step = 3
    call = router.generate(text="hello", max_tokens=9, n=n)
    early = [await call.read()]
    while len(tokens_in(early, n - 1)) < 4:
        early.append(await call.read())
    second = await spare_decode(router)
    await first.die()
    replies = [*early, *await read_on(call)]
    for index in range(n):
        assert tokens_in(replies, index) == tokens_of(PROMPT, 9, index)
    delivered = {tuple(decode.spec.indices): len(token_ids_of(decode.spec)) for decode in second.decodes}
    assert delivered == {((index,) if n > 1 else ()): len(PROMPT) + 4 for index in range(n)}


async def read_on(call: grpc.aio.UnaryStreamCall[object, object]) -> list[object]:
    replies = []
    while (reply := await call.read()) is not grpc.aio.EOF:
        replies.append(reply)
    return replies


async def test_a_worker_that_is_silent_is_dropped(start_router: StartRouter) -> None:
    router = await start_router(worker_silence_s=1.5)
    prefill, decode = await router.pair()
    decode.stop_heartbeat()
    assert await decode.dropped() is grpc.StatusCode.FAILED_PRECONDITION
    await router.until_status(lambda status: [w.registration.worker_id for w in status.workers] == ["p0"])
    del prefill


@pytest.mark.parametrize(
    "message",
    [
        {"heartbeat": link.Heartbeat()},
        {"register": link.Register(worker_id="w", incarnation=1)},
        {"register": link.Register(worker_id="", incarnation=1, role=link.ROLE_DECODE)},
        {"register": link.Register(worker_id="w", role=link.ROLE_DECODE)},
        {"register": link.Register(worker_id="w", incarnation=1, role=link.ROLE_DECODE, launch_id=65 * "u")},
        {
            "register": link.Register(
                worker_id="w", incarnation=1, role=link.ROLE_DECODE, trial_steps=65 * [link.StepCost()]
            )
        },
        {"register": link.Register(worker_id="w", incarnation=1, role=link.ROLE_DECODE, ready=True)},
    ],
)
async def test_a_worker_that_does_not_say_who_it_is_is_turned_away(
    start_router: StartRouter, message: dict[str, object]
) -> None:
    router = await start_router()
    stranger = await router.unattached(link.Register())
    stranger.listen()
    await stranger.say(**message)
    assert await stranger.dropped() is grpc.StatusCode.FAILED_PRECONDITION
    await router.until_status(lambda status: not status.workers)


@pytest.mark.parametrize("field", KvLayout.__slots__)
async def test_workers_whose_layouts_differ_in_any_field_are_not_paired(start_router: StartRouter, field: str) -> None:
    windowed = KvGroup("window", 1, 1, LAYOUT.head_dim, LAYOUT.page_size, window=4)
    others = {
        "weights_hash": "x",
        "dtype": "float16",
        "page_digest": "splitmix64",
        "others": (windowed,),
        "kv_parts": 1,
    }
    router = await start_router(converts_kv=field != "dtype")
    await router.worker(link.ROLE_PREFILL, "p0")
    other = replace(LAYOUT, **{field: others[field] if field in others else getattr(LAYOUT, field) + 1})
    await router.worker(link.ROLE_DECODE, "d0", layout=layout_to_proto(other))
    await router.until_status(lambda s: any(field in w.unroutable for w in s.workers))


async def test_nonsense_from_a_worker_costs_that_worker_only(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    mad = await router.worker(link.ROLE_DECODE, "d9")
    await mad.say(failed=link.Failed(code=99))  # type: ignore[arg-type]
    assert await mad.dropped() is grpc.StatusCode.FAILED_PRECONDITION
    assert tokens_in(await collect(router.generate(text="hello", max_tokens=3))) == tokens_of(PROMPT, 3)


async def test_a_loading_worker_is_shown_and_not_used(start_router: StartRouter) -> None:
    router = await start_router(pool_grace_s=0)
    await router.worker(link.ROLE_PREFILL, "p0")
    loading = await router.worker(link.ROLE_DECODE, "d0", ready=False, load_progress=0.5)
    await router.until_status(
        lambda s: [w.unroutable for w in s.workers if w.registration.worker_id == "d0"] == ["it is loading"]
    )
    code, message = await error_of(router.generate(text="hello"))
    assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "no decode worker is ready (d0: it is loading)")
    loading.registration.ready = True
    await loading.say(register=loading.registration)
    await router.until_status(lambda status: not any(w.unroutable for w in status.workers))
    assert tokens_in(await collect(router.generate(text="hello", max_tokens=3))) == tokens_of(PROMPT, 3)


async def test_operators_see_requests_and_their_ends(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, decode = await router.pair()
    await collect(router.generate(text="hello", max_tokens=3))
    prefill.is_paused = True
    call = router.generate(text="hello", max_tokens=3)
    await decode.until(lambda: len(decode.decodes) == 2)
    reply = await router.admin.GetStatus(admin.GetStatusRequest(), metadata=await router.proof("GetStatus"))
    status = reply.status
    assert (status.model, status.num_active, dict(status.ended)) == ("tiny", 1, {"OK": 1})
    assert {w.registration.worker_id: w.num_assigned for w in status.workers} == {"p0": 1, "d0": 1}
    assert all(w.load.pages_free == 1000 for w in status.workers)
    call.cancel()


async def test_a_process_that_is_gone_is_announced_and_its_link_dropped(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, decode = await router.pair()
    gone = link.ProcessGone(worker_id="d0", incarnation=decode.registration.incarnation)
    await router.admin.ReportProcessGone(
        admin.ReportProcessGoneRequest(process=gone), metadata=await router.proof("ReportProcessGone")
    )
    await prefill.until(lambda: prefill.gone == [gone])
    assert await decode.dropped() is DISMISSED_STATUS, "it lives, and has to end"


async def test_a_process_with_a_successor_is_told_to_end_and_counted(start_router: StartRouter) -> None:
    router = await start_router()
    _, decode = await router.pair()
    earlier = decode.registration.incarnation - 1
    zombie = await router.unattached(link.Register(worker_id="d0", incarnation=earlier, role=link.ROLE_DECODE))
    zombie.listen()
    await zombie.say(register=zombie.registration)
    assert await zombie.dropped() is DISMISSED_STATUS
    reply = await router.admin.GetStatus(admin.GetStatusRequest(), metadata=await router.proof("GetStatus"))
    assert dict(reply.status.refused) == {"incarnation": 1}
    assert [w.registration.incarnation for w in reply.status.workers if w.registration.worker_id == "d0"] == [
        decode.registration.incarnation
    ]
    await zombie.die()


async def drain(router: RouterUnderTest, name: str, *, cancel: bool = False) -> grpc.StatusCode:
    """Ask a worker to drain, or to take work again; return the call's status."""
    request, proof = admin.DrainWorkerRequest(worker_id=name, cancel=cancel), await router.proof("DrainWorker")
    return await router.admin.DrainWorker(request, metadata=proof).code()


async def test_a_drain_and_its_end_are_passed_on(start_router: StartRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await start_router()
    _, decode = await router.pair()
    assert await drain(router, "d0") is grpc.StatusCode.OK
    await router.until_status(lambda status: any(worker.load.draining for worker in status.workers))
    assert await drain(router, "d0", cancel=True) is grpc.StatusCode.OK
    await router.until_status(lambda status: not any(worker.load.draining for worker in status.workers))
    assert await drain(router, "nobody") is grpc.StatusCode.NOT_FOUND
    monkeypatch.setattr(endpoint, "ASKED_TIMEOUT_S", 0.2)
    decode.stop_heartbeat()
    await decode.say(heartbeat=link.Heartbeat(draining=True, drain_reason="its pages are quarantined"))
    await router.until_status(lambda status: any(worker.load.draining for worker in status.workers))
    assert await drain(router, "d0", cancel=True) is grpc.StatusCode.FAILED_PRECONDITION
    monkeypatch.setattr(endpoint, "ASKED_TIMEOUT_S", 5.0)
    leaving = asyncio.create_task(drain(router, "d0", cancel=True))
    await asyncio.sleep(0)
    await decode.die()
    assert await leaving in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND)


async def test_a_worker_that_loads_ends_its_drain_once_it_has_loaded(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await start_router()
    monkeypatch.setattr(endpoint, "ASKED_TIMEOUT_S", 0.2)
    loading = await router.unattached(link.Register(worker_id="d0", incarnation=1, role=link.ROLE_DECODE))
    loading.listen()
    await loading.say(register=loading.registration)  # and it sends no heartbeat
    await router.until_status(lambda status: len(status.workers) == 1)
    assert await drain(router, "d0") is grpc.StatusCode.OK
    assert await drain(router, "d0", cancel=True) is grpc.StatusCode.DEADLINE_EXCEEDED
    monkeypatch.setattr(endpoint, "ASKED_TIMEOUT_S", 5.0)
    answer = asyncio.create_task(drain(router, "d0", cancel=True))
    await loading.say(heartbeat=link.Heartbeat(pages_free=1))  # its first
    assert await answer is grpc.StatusCode.OK
    await loading.die()
