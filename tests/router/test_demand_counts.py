"""What a router counts of its clients' demand."""

import pytest
from router_driver import LENGTH, Driver, placed_request

from pdserve.base.errors import ProtocolError
from pdserve.capacity.wires import Delta
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.admin import demand_from_proto, demand_to_proto
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.reports import NUM_BANDS, Demand, band_of
from pdserve.router.config import Limits
from pdserve.router.requests.events import ClientGone, LinkLost, StepReported

BANDS = range(NUM_BANDS)


def bands(*lengths: int) -> tuple[int, ...]:
    """Return the counts of so many lengths by band."""
    found = [band_of(length) for length in lengths]
    return tuple(found.count(band) for band in BANDS)


def counted(driver: Driver) -> Demand:
    return driver.core.placements.demand.counted()


def test_an_answered_request_counts_with_its_lengths_and_within_its_objectives() -> None:
    d, prefill, decode, request = placed_request(ttft_s=1.0, prompt=range(40))
    assert counted(d) == Demand(num_requests=1, prompt_tokens=40, prompts=bands(40))
    d.tokens(prefill, request, 0, 10)
    d.tokens(decode, request, 1, 11, 12, 13, end=LENGTH)
    d.answer(request)
    assert counted(d) == Demand(
        num_requests=1,
        prompt_tokens=40,
        answer_tokens=4,
        prompts=bands(40),
        answers=bands(4),
        num_judged=1,
        num_within_ttft=1,
        num_within_tpot=1,
        num_within_both=1,
    )


def test_a_late_first_token_misses_one_objective_and_so_both() -> None:
    d, prefill, decode, request = placed_request(ttft_s=1.0, max_tokens=2)
    d.now_s += 1.5
    d.tokens(prefill, request, 0, 10)
    d.tokens(decode, request, 1, 11)
    demand = counted(d)
    assert (demand.num_judged, demand.num_within_ttft, demand.num_within_tpot, demand.num_within_both) == (1, 0, 1, 0)


def test_a_request_that_nobody_could_serve_counts_with_its_whole_prompt_as_missed() -> None:
    d = Driver(Limits(pool_grace_s=1.0))
    request = d.arrive(ttft_s=9.0, prompt=range(100))
    assert counted(d) == Demand(num_requests=1, prompt_tokens=100)
    d.run(2.0)
    d.refusal(request)
    assert counted(d) == Demand(num_requests=1, prompt_tokens=100, prompts=bands(100), num_judged=1)


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_request_whose_client_leaves_is_not_judged(is_placed: bool) -> None:
    d = Driver()
    if is_placed:
        d.pair()
    request = d.arrive(ttft_s=9.0)
    d.post(ClientGone(request))
    assert counted(d) == Demand(num_requests=1, prompt_tokens=3, prompts=bands(3))


def test_a_request_without_objectives_is_not_judged() -> None:
    d, prefill, _, request = placed_request(max_tokens=1)
    d.tokens(prefill, request, 0, 10)
    assert counted(d) == Demand(1, 3, 0, 1, bands(3), bands(1))


def test_what_a_worker_has_cached_is_not_to_be_computed() -> None:
    d = Driver(policy="goodput")
    prefill, _ = d.pair()
    request = d.arrive(prompt=range(200), max_tokens=1)
    d.tokens(prefill, request, 0, 10)
    d.arrive(prompt=range(200))
    demand = counted(d)
    assert 0 < demand.cached_tokens < 200
    assert demand.prompts == bands(200, 200 - demand.cached_tokens)


def test_a_request_that_is_placed_again_counts_once() -> None:
    d = Driver()
    prefill, _ = d.pair()
    d.attach("p1")
    d.arrive()
    d.post(LinkLost(prefill, "it left"))
    assert d.placed().spec.attempt == 1
    assert counted(d) == Demand(num_requests=1, prompt_tokens=3, prompts=bands(3))


def test_demand_survives_the_wire_and_other_bands_are_refused_by_name() -> None:
    demand = Demand(5, 700, 32, 90, bands(1, 40, 1 << 30), bands(7, 7), 4, 3, 2, 1)
    assert demand_from_proto(demand_to_proto(demand)) == demand
    message = demand_to_proto(demand)
    message.answers.append(0)
    with pytest.raises(ProtocolError, match=r"demand\.answers: 49 bands, 48 are expected"):
        demand_from_proto(message)


def test_a_vector_is_no_answer_and_its_prompt_is_counted_apart() -> None:
    d = Driver()
    prefill, _ = d.pair()
    chat = d.arrive(prompt=range(8))
    vector = d.arrive(prompt=range(40), max_tokens=1, pooling=Pooling("last"))
    delta = Delta(vector, 0, 0, 0, (), inference.FINISH_REASON_STOP, pooled=b"\0" * 16)
    d.post(StepReported(prefill, [delta]))
    d.post(ClientGone(chat))
    demand = counted(d)
    assert demand == Demand(2, 48, prompts=bands(8, 40), num_pooled=1, pooled_tokens=40)
    assert demand_from_proto(demand_to_proto(demand)) == demand
