"""How requests end in the router, and what their ledgers tell."""

import pytest
from router_driver import LENGTH, Driver, placed_request

from pdserve.protocol.refusal import Cause, Refused
from pdserve.protocol.reports import Stage
from pdserve.router.requests.events import LinkLost


def test_what_a_request_waited_for_is_not_why_it_ends_once_it_was_placed() -> None:
    d = Driver()
    prefill = d.attach("p0")
    request = d.arrive(deadline_in_s=2.0)
    assert d.core.num_held == 1
    d.attach("d0")
    d.tokens(prefill, request, 0, 10)
    d.wait(2.0)
    assert d.refusal(request) == Refused(Cause.DEADLINE, "the deadline passed after 1 tokens")
    assert d.core.placements.refused_because == {Cause.DEADLINE: 1}


def test_the_deadline_ends_a_request_on_both_workers() -> None:
    d, prefill, decode, request = placed_request(deadline_in_s=2.0)
    d.tokens(prefill, request, 0, 10)
    assert d.core.next_wakeup_s() == 102.0
    d.wait(2.0)
    assert d.refusal(request) == Refused(Cause.DEADLINE, "the deadline passed after 1 tokens")
    assert {(c.link, c.indices) for c in d.cancels()} == {(prefill, ()), (decode, ())}
    d.core.check_idle()


def test_the_ledger_adds_up() -> None:
    d, prefill, decode, request = placed_request()
    d.now_s += 0.010
    d.stage(prefill, request, Stage.PREFILL_QUEUED, age_s=0.009)
    d.stage(prefill, request, Stage.PREFILL_STARTED, age_s=0.008, cached_tokens=2)
    d.stage(decode, request, Stage.GRANTED, age_s=0.007, pages_reused=1)
    d.now_s += 0.010
    d.tokens(prefill, request, 0, 10)
    d.now_s += 0.002
    d.stage(prefill, request, Stage.PREFILL_DONE, age_s=0.001)
    d.stage(decode, request, Stage.LANDED, handoff_bytes=100, handoff_s=0.003)
    d.stage(decode, request, Stage.COMMITTED)
    d.stage(decode, request, Stage.DECODE_JOINED)
    d.now_s += 0.008
    d.tokens(decode, request, 1, 11, 12, 13, end=LENGTH)
    answer = d.answer(request)
    ledger = answer.ledger
    at_ms = {stage: round(ms, 6) for stage, ms in ledger.steps}
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


def test_the_hand_off_of_a_failed_attempt_is_not_in_the_ledger() -> None:
    d, prefill, first, request = placed_request(max_tokens=2)
    d.stage(first, request, Stage.GRANTED)
    d.stage(first, request, Stage.LANDED)
    d.attach("d1")
    d.post(LinkLost(first, "its stream ended"))
    second = d.placed().decode
    assert second is not None
    d.stage(second.link, request, Stage.COMMITTED, attempt=1)
    d.tokens(prefill, request, 0, 10, attempt=1)
    d.tokens(second.link, request, 1, 11, attempt=1, end=LENGTH)
    stages = [stage for stage, _ in d.answer(request).ledger.steps]
    assert Stage.COMMITTED in stages
    assert Stage.LANDED not in stages
