"""A capacity is what a server answers right at most; a server that answers nothing right has none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from pdserve.clock import MonotonicClock
from pdserve.errors import CommandError
from pdserve.measure.client import Client, connect
from pdserve.measure.live import FIRST_IN_FLIGHT, MOST_IN_FLIGHT, Ramp, saturate
from pdserve.measure.workload import Arrival
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server

pytestmark = pytest.mark.slow

SERVICE_S = 0.25


class Slots(InferenceServiceServicer):
    """Answers so many requests at a time, each in SERVICE_S, with so many tokens fewer than were asked for."""

    def __init__(self, count: int, missing: int = 0, refusal: grpc.StatusCode | None = None) -> None:
        self._slots = asyncio.Semaphore(count)
        self._missing = missing
        self._refusal = refusal
        self.num_asked = 0

    async def Generate(  # noqa: N802
        self, request: inference.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference.GenerateResponse]:
        self.num_asked += 1
        if self._refusal is not None:
            await context.abort(self._refusal, "no")
        async with self._slots:
            await asyncio.sleep(SERVICE_S)
        ids = range(request.sampling.max_tokens - self._missing)
        yield inference.GenerateResponse(deltas=[inference.SequenceDelta(index=0, token_ids=ids)])


@asynccontextmanager
async def client_of(servicer: Slots) -> AsyncIterator[Client]:
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            yield Client(channel, MonotonicClock())
    finally:
        await server.stop(None)


async def capacity(servicer: Slots, seconds: float) -> float:
    async with client_of(servicer) as client:
        return await saturate(client, [Arrival(0.0, 4, 3)], [[1, 2, 3, 4]], seconds)


def test_more_are_kept_in_flight_until_that_brings_no_more_answers() -> None:
    ramp, limit = Ramp(), 5 * FIRST_IN_FLIGHT
    while ramp.grow(float(min(limit, ramp.num_in_flight))):
        pass
    assert limit < ramp.num_in_flight < 4 * limit


def test_what_is_in_flight_is_bounded() -> None:
    ramp = Ramp()
    while ramp.grow(float(ramp.num_in_flight)):
        pass
    assert ramp.num_in_flight == MOST_IN_FLIGHT


def test_a_server_that_takes_more_than_the_first_number_in_flight_shows_its_whole_capacity() -> None:
    slots = 2 * FIRST_IN_FLIGHT
    found = asyncio.run(capacity(Slots(slots), 3.0))
    assert found > 1.15 * FIRST_IN_FLIGHT / SERVICE_S
    assert found <= 1.05 * slots / SERVICE_S


@pytest.mark.parametrize("status", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
def test_a_server_that_refuses_everything_has_no_capacity_and_is_not_hammered(status: grpc.StatusCode) -> None:
    servicer = Slots(1, refusal=status)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(in_group(servicer))
    assert caught.group_contains(CommandError, match=f"x {status.name}")
    assert servicer.num_asked <= 12 * FIRST_IN_FLIGHT


def test_a_cluster_whose_first_answer_takes_longer_than_the_first_try_has_a_capacity() -> None:
    tried_s = 0.24
    assert tried_s < SERVICE_S
    assert asyncio.run(capacity(Slots(100), 2 * tried_s)) > 0


async def in_group(servicer: Slots) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(capacity(servicer, 1.0))


def test_answers_that_lack_tokens_do_not_count() -> None:
    with pytest.raises(CommandError, match=r"[0-9]+ of [0-9]+ tokens came"):
        asyncio.run(capacity(Slots(100, missing=1), 1.0))
