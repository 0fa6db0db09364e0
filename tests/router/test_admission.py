"""How many requests are placed at once, which wait, in what order they go on, and what those refused are told."""

import pytest
from router_driver import LENGTH, Driver

from pdserve.base.ids import RequestId
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.refusal import Status
from pdserve.protocol.reports import Stage
from pdserve.router.config import Limits
from pdserve.router.requests.admission import MAX_OVERTAKEN
from pdserve.router.requests.events import ClientGone, LinkId

PATIENT = 1e9


def placed_later(d: Driver, prefill: LinkId, running: list[RequestId]) -> list[RequestId]:
    """End running requests one by one, each after its first token; return who is placed in their stead, in order."""
    order: list[RequestId] = []
    while running:
        d.tokens(prefill, running.pop(0), 0, 9, end=LENGTH)
        placed = [place.spec.request_id for place in d.placements()]
        order += placed
        running += placed
    return order


# ---- how many are placed


def test_every_sequence_that_the_attached_workers_decode_at_once_can_be_used() -> None:
    d = Driver()
    for number in range(4):
        d.attach(f"p{number}")
    for number in range(16):
        d.attach(f"d{number}", max_num_seqs=256)
    for _ in range(16 * 256):
        d.arrive()
    assert (d.core.num_active, d.core.num_held) == (16 * 256, 0)


def test_no_more_are_placed_than_keep_the_workers_busy_and_more_once_there_are_more_workers() -> None:
    d = Driver()
    d.pair()
    for _ in range(20):
        d.arrive()
    assert (d.core.num_active, d.core.num_held) == (16, 4), "the decode worker decodes 8 at once"
    d.attach("d1")
    assert (d.core.num_active, d.core.num_held) == (20, 0)


def test_no_more_are_placed_than_the_prefill_workers_take() -> None:
    d = Driver()
    d.attach("p0")
    for number in range(8):
        d.attach(f"d{number}", max_num_seqs=256)
    for _ in range(8 * 256 + 1024 + 1):
        d.arrive()
    assert (d.core.num_active, d.core.num_held) == (8 * 256 + 1024, 1)


# ---- who is refused


def test_a_request_that_can_no_longer_meet_its_objective_is_refused_though_it_is_the_limit_that_keeps_it() -> None:
    d = Driver(Limits(max_num_requests=1, worker_silence_s=PATIENT), policy="goodput")
    d.pair()
    d.teach(prefill_token_s=0.01, decode_step_s=0.01)
    d.arrive()
    d.arrive()
    held = d.arrive(ttft_s=0.5)
    assert (d.core.num_active, d.core.num_held) == (1, 2)
    d.run(0.4)
    assert held not in d.ends
    d.run(0.1)
    refusal = d.refusal(held)
    assert refusal.status is Status.RESOURCE_EXHAUSTED
    assert refusal.message.startswith("slo.ttft_ms: the first token would come after 5")
    assert refusal.predicted_ttft_s is not None
    assert 0.5 < refusal.predicted_ttft_s < 0.6
    assert refusal.retry_after_s is not None


def test_a_request_crowded_out_is_told_what_it_waited_for() -> None:
    d = Driver(Limits(max_num_held=1))
    d.attach("d0")
    d.arrive()
    message = d.refusal(d.arrive()).message
    assert message == "no prefill worker is ready; max_num_held: 1 more wait"
    d = Driver(Limits(max_num_requests=1, max_num_held=1))
    d.pair()
    d.arrive()
    d.arrive()
    message = d.refusal(d.arrive()).message
    assert message == "max_num_requests: 1 requests are placed already; max_num_held: 1 more wait"


def with_a_queue() -> tuple[Driver, LinkId, list[RequestId]]:
    """Return a cluster, its prefill worker, and requests of 100 ms each that it computes one by one."""
    d = Driver(Limits(worker_silence_s=PATIENT), policy="goodput")
    prefill = d.attach("p0", num_pages=1000, max_num_seqs=64, max_model_len=4096, max_num_batched_tokens=1000)
    d.attach("d0", num_pages=1000, max_num_seqs=64, max_model_len=4096)
    d.teach(prefill_token_s=1e-4, decode_step_s=0.01)
    return d, prefill, [d.arrive(prompt=[number] * 1000) for number in range(8)]


@pytest.mark.parametrize(("priority", "is_placed"), [(-1, False), (0, False), (1, True), (1000, True)])
def test_a_request_is_not_refused_for_a_queue_that_it_overtakes(priority: int, is_placed: bool) -> None:
    d, _, _ = with_a_queue()
    request = d.arrive(prompt=[9] * 1000, ttft_s=0.3, priority=priority)
    assert (request in d.core.placements.requests) is is_placed
    if is_placed:
        predicted_ms = d.core.placements.requests[request].ledger.predicted_ttft_ms
        assert predicted_ms == pytest.approx(200, rel=0.2), "the prompt that is computed, and its own"
    else:
        assert d.refusal(request).predicted_ttft_s == pytest.approx(0.9, rel=0.2)


def test_a_request_is_refused_for_those_of_its_own_priority_that_come_first() -> None:
    d, _, _ = with_a_queue()
    urgent = [d.arrive(prompt=[9, number] * 500, ttft_s=0.35, priority=5) for number in range(5)]
    assert [request in d.core.placements.requests for request in urgent] == [True, True, False, False, False]


@pytest.mark.parametrize(("priority", "is_learnt"), [(0, True), (1, False)])
def test_a_wait_behind_a_later_request_of_a_higher_priority_teaches_nothing(priority: int, is_learnt: bool) -> None:
    d, prefill, queue = with_a_queue()
    d.arrive(prompt=[9] * 1000, priority=priority)
    before = d.predictor.ttft_median
    d.now_s += 5.0
    d.stage(prefill, queue[-1], Stage.PREFILL_DONE)
    d.tokens(prefill, queue[-1], 0, 9)
    assert (d.predictor.ttft_median != before) is is_learnt


# ---- who goes past whom


def full_of_large_ones(max_hold_s: float) -> tuple[Driver, RequestId]:
    """Return a cluster with room for small prompts alone, and a large one that waits."""
    d = Driver(Limits(max_hold_s=max_hold_s, worker_silence_s=PATIENT), policy="goodput")
    d.attach("p0")
    d.attach("d0", num_pages=1000, max_num_seqs=64, max_model_len=4096)
    d.teach(prefill_token_s=1e-5, decode_step_s=0.01)
    d.predictor.lengths.tokens.value = 4.0
    large = [d.arrive(prompt=[number] * 3600, ttft_s=60.0) for number in range(5)]
    assert (d.core.num_active, d.core.num_held) == (4, 1)
    return d, large[-1]


def test_a_request_with_room_goes_past_one_without() -> None:
    d, large = full_of_large_ones(max_hold_s=30.0)
    small = d.arrive(ttft_s=60.0)
    assert d.placed().spec.request_id == small
    other = d.arrive(priority=-1)
    assert d.placed().spec.request_id == other
    assert large not in d.ends


def test_a_request_is_gone_past_so_often_and_then_waited_for() -> None:
    d, large = full_of_large_ones(max_hold_s=5.0)
    for _ in range(MAX_OVERTAKEN):
        small = d.arrive(ttft_s=60.0)
        assert d.placed().spec.request_id == small
    waiting, urgent = d.arrive(ttft_s=60.0), d.arrive(ttft_s=60.0, priority=1)
    assert d.placed().spec.request_id == urgent, "higher classes go first anyway"
    assert d.core.num_held == 2
    d.run(5.0)
    assert d.refusal(large).status is Status.RESOURCE_EXHAUSTED, "in the end it is refused"
    assert waiting in d.core.placements.requests


def test_a_request_that_was_gone_past_is_placed_as_soon_as_there_is_room_for_it() -> None:
    d, large = full_of_large_ones(max_hold_s=30.0)
    for _ in range(MAX_OVERTAKEN + 1):
        d.arrive(ttft_s=60.0)
    first = next(iter(d.core.placements.requests.values())).request_id
    d.tokens(LinkId(1), first, 0, 9, end=LENGTH)
    assert next(place.spec.request_id for place in d.placements()) == large


# ---- tenants


def test_however_many_wait_for_a_decode_worker_they_keep_none_that_needs_none() -> None:
    d = Driver()
    d.attach("p0")
    for _ in range(30):
        d.arrive()
    alone = d.arrive(max_tokens=1)
    assert [place.spec.request_id for place in d.placements()] == [alone]


def test_a_request_whose_first_token_ends_it_is_placed_when_a_prefill_worker_attaches_alone() -> None:
    d = Driver()
    alone, paired = d.arrive(max_tokens=1), d.arrive()
    d.attach("p0")
    assert [place.spec.request_id for place in d.placements()] == [alone]
    d.attach("d0")
    assert [place.spec.request_id for place in d.placements()] == [paired]


def test_what_a_tenant_was_served_while_nobody_waited_counts_once_somebody_does() -> None:
    d = Driver(Limits(max_num_requests=2))
    prefill, decode = d.pair()
    greedy = d.arrive(tenant="greedy", max_tokens=100)
    running = [d.arrive(tenant="modest")]
    d.tokens(prefill, greedy, 0, 9)
    d.tokens(decode, greedy, 1, *range(50))
    modest = [d.arrive(tenant="modest") for _ in range(3)]
    other = d.arrive(tenant="greedy")
    assert placed_later(d, prefill, running) == [*modest, other]


# ---- requests that never decode


VECTOR: dict[str, object] = {"pooling": Pooling("last"), "max_tokens": 1}


def test_vectors_leave_chats_all_that_decode_workers_decode_at_once() -> None:
    d = Driver()
    d.pair()
    for _ in range(20):
        d.arrive(priority=-1, **VECTOR)
    assert (d.core.num_active, d.core.num_held) == (16, 4), "as many again as the prefill worker takes"
    chats = [d.arrive() for _ in range(16)]
    assert set(chats) <= set(d.core.placements.requests)
    assert (d.core.num_active, d.core.num_held) == (32, 4)
    d.arrive()
    assert d.core.num_held == 5


def test_a_vector_is_placed_while_chats_have_all_their_places_and_each_end_makes_room_for_its_kind() -> None:
    d = Driver()
    prefill, _ = d.pair()
    chats = [d.arrive() for _ in range(17)]
    vectors = [d.arrive(priority=-1, **VECTOR) for _ in range(17)]
    assert (d.core.num_active, d.core.num_held) == (32, 2)
    d.post(ClientGone(vectors[0]))
    assert vectors[16] in d.core.placements.requests
    d.tokens(prefill, chats[0], 0, 9, end=LENGTH)
    assert chats[16] in d.core.placements.requests
    assert d.core.num_held == 0


def test_a_chat_is_not_refused_for_vectors_that_are_placed_before_it() -> None:
    d = Driver(Limits(worker_silence_s=PATIENT), policy="goodput")
    d.pair()
    d.teach(prefill_token_s=1e-4, decode_step_s=0.01)
    for _ in range(17):
        d.arrive(priority=-1, **VECTOR)
    chat = d.arrive(ttft_s=0.3)
    assert chat in d.core.placements.requests


def test_a_limit_that_is_set_holds_for_all_kinds_together() -> None:
    d = Driver(Limits(max_num_requests=2))
    d.pair()
    for _ in range(2):
        d.arrive(**VECTOR)
    d.arrive()
    assert (d.core.num_active, d.core.num_held) == (2, 1)
