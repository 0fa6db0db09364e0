"""The router's decisions, one by one."""

from dataclasses import replace

import pytest
from router_driver import LAYOUT, LENGTH, PROMPT, STOP, Driver

from pdserve.errors import Refusal, Status
from pdserve.ids import Incarnation, WorkerId
from pdserve.router.events import (
    AskDrain,
    ClientGone,
    ClientTooSlow,
    DrainAsked,
    DropLink,
    Failure,
    Limits,
    LinkLost,
    Load,
    LoadReported,
    ProcessEnded,
    Refused,
    ShutdownAsked,
    StopStringFound,
    TellProcessGone,
    WorkerRegistered,
)
from pdserve.router.ladder import Rung

# ---- placement


def test_a_request_goes_to_both_workers_at_once() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive(n=2)
    place = d.placed()
    assert (place.prefill.link, place.decode and place.decode.link) == (prefill, decode)
    assert place.decode is not None
    assert place.decode.handoff_address == "d0:1"
    assert (place.spec.request_id, place.spec.attempt, place.spec.indices) == (request, 0, (0, 1))
    assert (place.spec.cache_salt, place.spec.remaining_s) == ("salt", 60.0)


def test_a_single_token_needs_no_decode_worker() -> None:
    d = Driver()
    prefill = d.attach("p0")
    request = d.arrive(max_tokens=1)
    assert d.placed().decode is None
    d.tokens(prefill, request, 0, 9)
    answer = d.answer(request)
    assert d.delivered[request, 0] == [9]
    assert answer.ledger.decode_worker == ""


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({}, "no prefill worker is ready"),
        ({"d0": {}}, "no prefill worker is ready"),
        ({"p0": {"ready": False}, "d0": {}}, "no prefill worker is ready (p0: it is loading)"),
        ({"p0": {}}, "no decode worker is ready"),
        ({"p0": {}, "d0": {"model": "x"}}, "no decode worker is ready (d0: model: x != m)"),
        (
            {"p0": {}, "d0": {"layout": replace(LAYOUT, page_size=32)}},
            "no compatible pair: page_size: 16 != 32, and movers write whole pages alone",
        ),
        ({"p0": {}, "d0": {"protocol_version": 2}}, "no compatible pair: protocol_version: 1 != 2"),
    ],
)
def test_without_a_pair_a_request_is_refused_with_the_reason(
    workers: dict[str, dict[str, object]], message: str
) -> None:
    d = Driver(Limits(pool_grace_s=0))
    for name, changes in workers.items():
        d.attach(name, **changes)
    assert not d.core.is_ready
    request = d.arrive()
    assert d.refusal(request) == Refused(Status.UNAVAILABLE, message)
    d.core.check_idle()


def test_an_incompatible_worker_is_passed_over() -> None:
    d = Driver()
    d.attach("p0", layout=replace(LAYOUT, page_size=32))
    prefill = d.attach("p1")
    d.attach("d0")
    for _ in range(3):
        d.arrive()
        assert d.placed().prefill.link == prefill


def test_requests_spread_over_idle_workers() -> None:
    d = Driver()
    for name in ("p0", "p1", "d0", "d1"):
        d.attach(name)
    pairs = []
    for _ in range(4):
        d.arrive()
        place = d.placed()
        assert place.decode is not None
        pairs.append((place.prefill.worker_id, place.decode.worker_id))
    assert {p for p, _ in pairs[:2]} == {"p0", "p1"}
    assert {q for _, q in pairs[:2]} == {"d0", "d1"}


def test_what_a_worker_reports_counts_as_load() -> None:
    d = Driver()
    d.pair()
    busy = d.attach("d1")
    d.post(LoadReported(busy, Load(num_running=7)))
    for _ in range(6):
        d.arrive()
        place = d.placed()
        assert place.decode is not None
        assert place.decode.worker_id == "d0"


def test_taking_turns_visits_every_pair() -> None:
    d = Driver(in_turn=True)
    for name in ("p0", "p1", "d0", "d1"):
        d.attach(name)
    seen = set()
    for _ in range(4):
        d.arrive()
        place = d.placed()
        assert place.decode is not None
        seen.add((place.prefill.worker_id, place.decode.worker_id))
    assert len(seen) == 4


def test_a_draining_worker_gets_nothing_more() -> None:
    d = Driver(Limits(pool_grace_s=0))
    prefill, decode = d.pair()
    assert d.post(DrainAsked(decode)) == [AskDrain(decode)]
    request = d.arrive()
    assert d.refusal(request).message == "no decode worker is ready (d0: it is draining)"
    d.post(LoadReported(prefill, Load(draining=True)))
    assert not d.core.is_ready


# ---- bounds


def test_requests_over_the_limit_wait_by_priority_and_then_are_refused() -> None:
    d = Driver(Limits(max_num_requests=1, max_num_held=2))
    prefill, _ = d.pair()
    running, low, high = d.arrive(max_tokens=1), d.arrive(), d.arrive(priority=1)
    assert (d.core.num_active, d.core.num_held) == (1, 2)
    refused = d.arrive()
    assert d.refusal(refused).status is Status.RESOURCE_EXHAUSTED
    assert d.refusal(refused).message.startswith("max_num_requests: 1 ")
    urgent = d.arrive(priority=2)
    assert d.refusal(low).status is Status.RESOURCE_EXHAUSTED, "the lowest gives way to the highest"
    d.tokens(prefill, running, 0, 9)
    assert d.placed().spec.request_id == urgent
    d.post(ClientGone(high))
    assert d.refusal(high).status is Status.CANCELLED


def test_a_held_request_ends_at_its_deadline() -> None:
    d = Driver(Limits(max_num_requests=1))
    d.pair()
    d.arrive()
    held = d.arrive(deadline_in_s=1.0)
    d.wait(1.0)
    assert d.refusal(held).status is Status.DEADLINE_EXCEEDED


def test_alarms_of_ended_requests_are_forgotten() -> None:
    d = Driver()
    prefill, _ = d.pair()
    for _ in range(1000):
        request = d.arrive(max_tokens=1)
        d.tokens(prefill, request, 0, 9)
    assert len(d.core._alarms) < 100


# ---- tokens


def test_tokens_are_taken_once_and_in_order() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive()
    d.tokens(prefill, request, 0, 10)
    d.tokens(prefill, request, 0, 10)
    d.tokens(decode, request, 1, 11, 12)
    d.tokens(decode, request, 1, 11, 12)
    d.tokens(decode, request, 2, 12, 13, end=LENGTH)
    assert d.delivered[request, 0] == [10, 11, 12, 13]
    assert d.answer(request).usage.completion_tokens == 4


def test_decode_may_overtake_the_first_token() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive()
    d.rung(decode, request, Rung.COMMITTED)
    d.tokens(decode, request, 1, 11)
    d.tokens(decode, request, 2, 12)
    assert (request, 0) not in d.delivered
    d.tokens(prefill, request, 0, 10)
    assert d.delivered[request, 0] == [10, 11, 12]
    d.tokens(decode, request, 3, 13, end=STOP)
    assert d.answer(request).ledger.decode_worker == "d0"


def test_decode_may_overtake_the_first_token_with_all_the_rest() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive()
    d.tokens(decode, request, 1, 11, 12, 13, end=LENGTH)
    d.tokens(prefill, request, 0, 10)
    assert d.delivered[request, 0] == [10, 11, 12, 13]
    assert d.answer(request).ledger.decode_worker == "d0"


def test_what_overtook_a_lost_attempt_is_not_counted_in_the_next() -> None:
    d = Driver()
    prefill, first = d.pair()
    request = d.arrive()
    d.tokens(first, request, 1, 11)
    second = d.attach("d1")
    d.post(LinkLost(first, "its stream ended"))
    d.tokens(second, request, 1, 11, 12, 13, attempt=1, end=LENGTH)
    d.tokens(prefill, request, 0, 10, attempt=1)
    assert d.delivered[request, 0] == [10, 11, 12, 13]
    assert d.answer(request).ledger.attempts == 2


def test_a_gap_ends_the_attempt_but_not_the_request() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive()
    d.tokens(prefill, request, 0, 10)
    d.tokens(decode, request, 2, 12)
    assert {cancel.link for cancel in d.cancels()} == {prefill, decode}
    d.wait(0.05)
    place = d.placed()
    assert (place.spec.attempt, tuple(place.spec.token_ids)) == (1, (*PROMPT, 10))


def test_more_tokens_than_asked_for_are_not_delivered() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive()
    d.tokens(prefill, request, 0, 10)
    d.tokens(decode, request, 1, 11, 12, 13, 14)
    assert d.delivered[request, 0] == [10]
    assert d.core.num_active == 1


def test_tokens_of_an_attempt_that_is_over_are_ignored() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive()
    d.fail(decode, request, Failure.TRANSFER_FAILED)
    d.wait(0.05)
    d.tokens(prefill, request, 0, 10)
    assert d.delivered == {}
    d.tokens(prefill, request, 0, 10, attempt=1)
    assert d.delivered[request, 0] == [10]


def test_tokens_of_another_worker_are_ignored() -> None:
    d = Driver()
    d.pair()
    stranger = d.attach("d9", layout=replace(LAYOUT, page_size=32))
    request = d.arrive()
    d.tokens(stranger, request, 0, 10)
    assert d.delivered == {}


def test_a_stop_string_ends_one_continuation_and_the_others_go_on() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive(n=2, max_tokens=2)
    d.tokens(prefill, request, 0, 10, index=0)
    d.tokens(prefill, request, 0, 20, index=1)
    d.post(StopStringFound(request, 0))
    assert {(c.link, c.indices) for c in d.cancels()} == {(prefill, (0,)), (decode, (0,))}
    d.tokens(decode, request, 1, 11, index=0)
    d.tokens(decode, request, 1, 21, index=1)
    assert d.delivered == {(request, 0): [10], (request, 1): [20, 21]}
    d.answer(request)


# ---- loss and failure


def test_a_lost_worker_before_the_first_token_costs_only_time() -> None:
    d = Driver()
    _, first = d.pair()
    second = d.attach("d1")
    request = d.arrive()
    prefill = d.placed().prefill.link
    d.post(LinkLost(first, "its stream ended"))
    place = d.placed()
    assert [(c.link, c.attempt) for c in d.cancels()] == [(prefill, 0)]
    assert place.decode is not None
    assert (place.decode.link, place.spec.attempt) == (second, 1)
    d.tokens(prefill, request, 0, 10, attempt=1)
    d.tokens(second, request, 1, 11, 12, 13, attempt=1, end=LENGTH)
    assert d.answer(request).ledger.attempts == 2


def test_a_lost_decode_worker_in_mid_answer_loses_and_doubles_nothing() -> None:
    d = Driver()
    prefill, first = d.pair()
    request = d.arrive()
    d.tokens(prefill, request, 0, 10)
    d.tokens(first, request, 1, 11)
    second = d.attach("d1")
    d.post(LinkLost(first, "its stream ended"))
    place = d.placed()
    assert tuple(place.spec.token_ids) == (*PROMPT, 10, 11)
    assert place.spec.num_prompt_tokens == len(PROMPT)
    d.tokens(prefill, request, 2, 12, attempt=1)
    d.tokens(second, request, 3, 13, attempt=1, end=LENGTH)
    assert d.delivered[request, 0] == [10, 11, 12, 13]
    d.answer(request)


def test_continuations_with_tokens_are_placed_again_one_by_one() -> None:
    d = Driver()
    prefill, first = d.pair()
    request = d.arrive(n=3, max_tokens=3)
    for index in range(3):
        d.tokens(prefill, request, 0, index, index=index)
    d.tokens(first, request, 1, 11, index=1)
    d.tokens(first, request, 1, 12, end=STOP, index=2)
    d.attach("d1")
    d.post(LinkLost(first, "its stream ended"))
    again = {(p.spec.attempt, p.spec.indices, tuple(p.spec.token_ids[3:])) for p in d.placements()}
    assert again == {(1, (0,), (0,)), (2, (1,), (1, 11))}


def test_decode_goes_on_without_its_prefill_worker() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive()
    d.tokens(prefill, request, 0, 10)
    d.rung(decode, request, Rung.COMMITTED)
    d.post(LinkLost(prefill, "its stream ended"))
    assert d.placements() == []
    d.tokens(decode, request, 1, 11, 12, 13, end=LENGTH)
    d.answer(request)


def test_a_prefill_worker_lost_before_the_commit_is_replaced() -> None:
    d = Driver()
    prefill, decode = d.pair()
    d.attach("p1")
    request = d.arrive()
    d.tokens(prefill, request, 0, 10)
    d.post(LinkLost(prefill, "its stream ended"))
    assert d.placed().prefill.worker_id == "p1"
    assert [c.link for c in d.cancels()] == [decode]


@pytest.mark.parametrize(
    ("failure", "status", "most"), [(Failure.OVERLOADED, Status.UNAVAILABLE, 8), (Failure.INTERNAL, Status.INTERNAL, 3)]
)
def test_attempts_are_bounded(failure: Failure, status: Status, most: int) -> None:
    d = Driver(Limits(worker_silence_s=1e6))
    prefill, _ = d.pair()
    request = d.arrive()
    for attempt in range(most):
        assert request not in d.ends
        d.fail(prefill, request, failure, attempt)
        d.wait(1.0)
    assert d.refusal(request) == Refused(status, f"p0: {failure.name}: no luck; placed {most} times")
    d.core.check_idle()


def test_a_failed_attempt_is_placed_elsewhere_where_there_is_an_elsewhere() -> None:
    d = Driver()
    for name in ("p0", "p1", "d0", "d1"):
        d.attach(name)
    request = d.arrive()
    first = d.placed()
    assert first.decode is not None
    d.fail(first.prefill.link, request, Failure.PEER_LOST)
    d.wait(0.05)
    second = d.placed()
    assert second.decode is not None
    assert second.decode.link != first.decode.link, "the peer is to blame"


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (Failure.PEER_LOST, Status.UNAVAILABLE),
        (Failure.TRANSFER_FAILED, Status.UNAVAILABLE),
        (Failure.OVERLOADED, Status.UNAVAILABLE),
        (Failure.DIGEST_MISMATCH, Status.INTERNAL),
        (Failure.INTERNAL, Status.INTERNAL),
    ],
)
def test_the_last_failure_decides_the_status(failure: Failure, status: Status) -> None:
    d = Driver(Limits(max_attempts=1, max_interruptions=1))
    prefill, decode = d.pair()
    request = d.arrive()
    d.fail(prefill, request, failure)
    assert d.refusal(request).status is status
    assert {c.link for c in d.cancels()} == {prefill, decode}


def test_what_no_worker_can_serve_is_not_tried_again() -> None:
    d = Driver()
    prefill, _ = d.pair()
    request = d.arrive()
    d.fail(prefill, request, Failure.INVALID)
    assert d.refusal(request) == Refused(Status.INTERNAL, "p0: INVALID: no luck")


def test_the_last_worker_of_a_pool_takes_its_requests_with_it() -> None:
    d = Driver(Limits(pool_grace_s=0))
    prefill, decode = d.pair()
    request = d.arrive(n=3)
    for index in range(3):
        d.tokens(prefill, request, 0, 10, index=index)
    d.post(LinkLost(decode, "its stream ended"))
    refusal = d.refusal(request)
    assert refusal.status is Status.UNAVAILABLE
    assert refusal.message == "d0 was lost (its stream ended), and no decode worker is ready"
    d.core.check_idle()


def test_the_last_worker_of_a_pool_may_hold_several_placements_of_a_request() -> None:
    d = Driver(Limits(pool_grace_s=0, max_deaths=3))
    prefill, first = d.pair()
    request = d.arrive(n=3)
    for index in range(3):
        d.tokens(prefill, request, 0, 10, index=index)
    second = d.attach("d1")
    d.post(LinkLost(first, "its stream ended"))
    assert len(d.placements()) == 3
    d.post(LinkLost(second, "its stream ended"))
    assert d.refusal(request).status is Status.UNAVAILABLE
    d.core.check_idle()


def test_a_silent_worker_is_dropped_and_a_loading_one_is_not() -> None:
    d = Driver(Limits(pool_grace_s=0))
    prefill, decode = d.pair()
    loading = d.attach("d1", ready=False)
    request = d.arrive()
    d.wait(3.0)
    d.post(LoadReported(prefill, Load()))
    assert d.core.next_wakeup_s() == 104.0
    d.wait(1.0)
    assert [c.link for c in d.last if isinstance(c, DropLink)] == [decode]
    assert d.refusal(request).status is Status.UNAVAILABLE
    assert d.core.workers.get(loading) is not None


def test_a_name_that_attaches_again_replaces_its_former_stream() -> None:
    d = Driver(Limits(pool_grace_s=0))
    _, old = d.pair()
    request = d.arrive()
    new = d.attach("d0", incarnation=2)
    assert DropLink(old, "a later process of its name has attached", Refusal.INCARNATION) in d.last
    assert d.refusal(request).status is Status.UNAVAILABLE
    d.arrive()
    place = d.placed()
    assert place.decode is not None
    assert (place.decode.link, place.decode.incarnation) == (new, 2)


def test_a_process_that_attaches_again_replaces_its_former_stream_and_is_not_sent_away() -> None:
    d = Driver()
    _, old = d.pair()
    d.attach("d0")
    assert DropLink(old, "its name attached again") in d.last


def test_a_worker_may_not_become_another() -> None:
    d = Driver()
    prefill, _ = d.pair()
    told = d.core.workers.known(prefill).registration
    d.post(WorkerRegistered(prefill, replace(told, incarnation=Incarnation(7))))
    assert [c.link for c in d.last if isinstance(c, DropLink)] == [prefill]


def test_the_end_of_a_process_is_told_to_workers_now_and_later() -> None:
    d = Driver()
    prefill, decode = d.pair()
    d.post(ProcessEnded(WorkerId("d0"), Incarnation(1)))
    drops = [(c.link, c.refusal) for c in d.last if isinstance(c, DropLink)]
    assert drops == [(decode, Refusal.INCARNATION)], "where it lives, it has to end"
    assert TellProcessGone(prefill, WorkerId("d0"), Incarnation(1)) in d.last
    late = d.attach("p1")
    assert TellProcessGone(late, WorkerId("d0"), Incarnation(1)) in d.last


# ---- ends


def test_the_deadline_ends_a_request_on_both_workers() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive(deadline_in_s=2.0)
    d.tokens(prefill, request, 0, 10)
    assert d.core.next_wakeup_s() == 102.0
    d.wait(2.0)
    assert d.refusal(request) == Refused(Status.DEADLINE_EXCEEDED, "the deadline passed after 1 tokens")
    assert {(c.link, c.indices) for c in d.cancels()} == {(prefill, ()), (decode, ())}
    d.core.check_idle()


def test_a_client_that_leaves_or_lags_frees_both_workers() -> None:
    d = Driver()
    prefill, decode = d.pair()
    gone, slow = d.arrive(), d.arrive()
    d.post(ClientGone(gone))
    assert {c.link for c in d.cancels()} == {prefill, decode}
    d.post(ClientTooSlow(slow, 1024))
    assert {c.link for c in d.cancels()} == {prefill, decode}
    assert d.refusal(slow).status is Status.RESOURCE_EXHAUSTED
    d.post(ClientGone(slow))
    d.core.check_idle()


def test_a_router_that_shuts_down_finishes_what_runs() -> None:
    d = Driver()
    prefill, _ = d.pair()
    running = d.arrive(max_tokens=1)
    d.post(ShutdownAsked())
    assert not d.core.is_ready
    refused = d.arrive()
    assert d.refusal(refused) == Refused(Status.UNAVAILABLE, "this router is shutting down")
    d.tokens(prefill, running, 0, 10)
    d.answer(running)


def test_the_ledger_adds_up() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive()
    d.now_s += 0.010
    d.rung(prefill, request, Rung.PREFILL_QUEUED, age_s=0.009)
    d.rung(prefill, request, Rung.PREFILL_STARTED, age_s=0.008, cached_tokens=2)
    d.rung(decode, request, Rung.GRANTED, age_s=0.007, pages_reused=1)
    d.now_s += 0.010
    d.tokens(prefill, request, 0, 10)
    d.now_s += 0.002
    d.rung(prefill, request, Rung.PREFILL_DONE, age_s=0.001)
    d.rung(decode, request, Rung.LANDED, handoff_bytes=100, handoff_s=0.003)
    d.rung(decode, request, Rung.COMMITTED)
    d.rung(decode, request, Rung.DECODE_JOINED)
    d.now_s += 0.008
    d.tokens(decode, request, 1, 11, 12, 13, end=LENGTH)
    answer = d.answer(request)
    ledger = answer.ledger
    at_ms = {rung: round(ms, 6) for rung, ms in ledger.steps}
    assert list(at_ms.items()) == [
        ("received", 0.0),
        ("tokenized", 0.0),
        ("admitted", 0.0),
        ("placed", 0.0),
        ("prefill_queued", 1.0),
        ("prefill_started", 2.0),
        ("granted", 3.0),
        ("prefill_done", 20.0),
        ("first_token", 20.0),
        ("landed", 22.0),
        ("committed", 22.0),
        ("decode_joined", 22.0),
        ("finished", 30.0),
    ]
    assert ledger.ttft_ms == pytest.approx(20.0)
    assert ledger.tpot_ms == pytest.approx(10.0 / 3)
    assert (ledger.handoff_bytes, ledger.handoff_pages_reused, answer.usage.cached_tokens) == (100, 1, 2)
    assert ledger.handoff_ms == pytest.approx(3.0)


def test_news_that_was_late_keeps_its_place_on_the_ladder() -> None:
    d = Driver()
    prefill, decode = d.pair()
    request = d.arrive(max_tokens=2)
    d.now_s += 0.010
    d.rung(prefill, request, Rung.PREFILL_STARTED, age_s=0.008)
    d.rung(prefill, request, Rung.PREFILL_QUEUED, age_s=0.005)
    d.rung(decode, request, Rung.COMMITTED, age_s=0.004)
    d.rung(decode, request, Rung.LANDED, age_s=0.001)
    d.tokens(prefill, request, 0, 10)
    d.tokens(decode, request, 1, 11, end=LENGTH)
    at_ms = {rung: round(ms, 6) for rung, ms in d.answer(request).ledger.steps}
    assert (at_ms[Rung.PREFILL_QUEUED], at_ms[Rung.PREFILL_STARTED]) == (2.0, 2.0)
    assert (at_ms[Rung.LANDED], at_ms[Rung.COMMITTED]) == (6.0, 6.0)


def test_the_hand_off_of_a_failed_attempt_is_not_in_the_ledger() -> None:
    d = Driver()
    prefill, first = d.pair()
    request = d.arrive(max_tokens=2)
    d.rung(first, request, Rung.GRANTED)
    d.rung(first, request, Rung.LANDED)
    d.attach("d1")
    d.post(LinkLost(first, "its stream ended"))
    second = d.placed().decode
    assert second is not None
    d.rung(second.link, request, Rung.COMMITTED, attempt=1)
    d.tokens(prefill, request, 0, 10, attempt=1)
    d.tokens(second.link, request, 1, 11, attempt=1, end=LENGTH)
    rungs = [rung for rung, _ in d.answer(request).ledger.steps]
    assert Rung.COMMITTED in rungs
    assert Rung.LANDED not in rungs
