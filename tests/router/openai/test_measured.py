"""A measurement sees the same of a request whichever door it takes."""

from contextlib import AsyncExitStack

import pytest
from http_door import StartHttp

from pdserve.base.clock import MonotonicClock
from pdserve.measure import http_client
from pdserve.measure.client import Client, Door, connect, request_of
from pdserve.measure.load import Load, door_notes, measure_load
from pdserve.measure.outcomes import ANY
from pdserve.measure.workload import Arrival, fixed_lengths


async def test_outcomes_are_the_same_over_http_and_grpc(start_http: StartHttp) -> None:
    door = await start_http()
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(connect(door.router.addresses.public))
        grpc = Client(channel, MonotonicClock())
        http = await stack.enter_async_context(http_client.connected(door.router.addresses.http))
        assert await http.vocab_size() == await grpc.vocab_size()
        request = request_of(Arrival(0.0, 3, 5), [5, 6, 7], "measured", ANY)
        one, other = await http.send(request), await grpc.send(request)
        assert (one.status, one.num_tokens, one.tokens) == ("OK", 5, other.tokens)
        assert one.stages_s.keys() == other.stages_s.keys()
        assert (one.attempts, one.prefill_worker) == (other.attempts, other.prefill_worker)
        assert one.ttft_s is not None
        assert one.ttft_s >= one.stages_s["first_token"]


@pytest.mark.parametrize(
    ("ids", "status", "detail"),
    [([1], "UNAVAILABLE", "worker"), ([10**6], "INVALID_ARGUMENT", "token id 1000000")],
)
async def test_refusals_are_read_from_either_door(
    start_http: StartHttp, ids: list[int], status: str, detail: str
) -> None:
    door = await start_http(pair=False, pool_grace_s=0.05)
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(connect(door.router.addresses.public))
        http = await stack.enter_async_context(http_client.connected(door.router.addresses.http))
        request = request_of(Arrival(0.0, 1, 1), ids, "", ANY)
        one, other = await http.send(request), await Client(channel, MonotonicClock()).send(request)
        assert (one.status, one.detail) == (other.status, other.detail.replace("token_ids:", "prompt:"))
        assert one.status == status
        assert detail in one.detail
        assert (one.predicted_ttft_s is None) == (other.predicted_ttft_s is None)
        assert (one.retry_after_s is not None) == (status == "UNAVAILABLE")


async def test_doors_take_turns_and_are_compared(start_http: StartHttp) -> None:
    door = await start_http()
    doors = {Door.GRPC: (door.router.addresses.public, None), Door.HTTP: (door.router.addresses.http, None)}
    load = Load([(fixed_lengths("w", 3, 4, 2), None)], ANY, seed=0, rounds=2)
    runs = await measure_load(doors, load)
    assert [(run.name, list(map(len, run.rounds))) for run in runs] == [
        ("w, grpc", [3, 3]),
        ("w, http", [3, 3]),
    ]
    assert all(each.status == "OK" for run in runs for each in run.outcomes)
    compared, cpu = door_notes(runs)
    assert compared.startswith("w: HTTP adds to gRPC's TTFT p50 ")
    assert " us" in cpu
