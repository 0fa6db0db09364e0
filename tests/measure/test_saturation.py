"""A capacity is what a server answers right at most; a server that answers nothing right has none."""

import asyncio

import pytest
from virtual_loop import LoopClock, run_virtually

from pdserve.base.errors import CommandError
from pdserve.measure.client import OpenLoop
from pdserve.measure.live import FIRST_IN_FLIGHT, MOST_IN_FLIGHT, Ramp, saturate
from pdserve.measure.outcomes import Outcome
from pdserve.measure.workload import Arrival
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Status

SERVICE_S = 0.25


class Slots(OpenLoop):
    """Answers so many requests at a time, each in SERVICE_S, with so many tokens fewer than were asked for."""

    def __init__(self, count: int, missing: int = 0, refusal: Status | None = None) -> None:
        super().__init__(LoopClock())
        self._slots = asyncio.Semaphore(count)
        self._missing = missing
        self._refusal = refusal
        self.num_asked = 0

    async def vocab_size(self) -> int:
        return 32

    async def _receive(self, request: inference.GenerateRequest, outcome: Outcome, began_s: float) -> None:
        self.num_asked += 1
        if self._refusal is not None:
            outcome.status = self._refusal.value
            return
        async with self._slots:
            await asyncio.sleep(SERVICE_S)
        outcome.take(request.sampling.max_tokens - self._missing, self.clock.now_s() - began_s)


async def capacity(server: Slots, seconds: float) -> float:
    return await saturate(server, [Arrival(0.0, 4, 3)], [[1, 2, 3, 4]], seconds)


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
    found = run_virtually(capacity(Slots(slots), 3.0))
    assert found == pytest.approx(slots / SERVICE_S, rel=0.1)


@pytest.mark.parametrize("status", [Status.RESOURCE_EXHAUSTED, Status.UNAVAILABLE])
def test_a_server_that_refuses_everything_has_no_capacity_and_is_not_hammered(status: Status) -> None:
    server = Slots(1, refusal=status)
    with pytest.raises(CommandError, match=f"x {status.value}"):
        run_virtually(capacity(server, 1.0))
    assert server.num_asked <= 12 * FIRST_IN_FLIGHT


def test_a_cluster_whose_first_answer_takes_longer_than_the_first_try_has_a_capacity() -> None:
    tried_s = 0.24
    assert tried_s < SERVICE_S
    assert run_virtually(capacity(Slots(100), 2 * tried_s)) > 0


def test_answers_that_lack_tokens_do_not_count() -> None:
    with pytest.raises(CommandError, match=r"[0-9]+ of [0-9]+ tokens came"):
        run_virtually(capacity(Slots(100, missing=1), 1.0))
