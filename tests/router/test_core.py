"""The router's decisions, one by one: where requests go, and how many."""

from dataclasses import replace

import pytest
from router_driver import LAYOUT, Driver, placed_request

from pdserve.errors import Status
from pdserve.ids import PROTOCOL_VERSION
from pdserve.reports import LoadPart, ReportedLoad
from pdserve.roles import Role
from pdserve.router.config import Limits
from pdserve.router.events import ClientGone, DrainAsked, LoadReported


def test_a_request_goes_to_both_workers_at_once() -> None:
    d, prefill, decode, request = placed_request(n=2)
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
            "no compatible pair: page_size: 16 != 32",
        ),
        (
            {"p0": {}, "d0": {"protocol_version": 99}},
            f"no decode worker is ready (d0: protocol_version: 99 != {PROTOCOL_VERSION})",
        ),
        (
            {"m0": {"role": Role.MIXED, "protocol_version": 99}},
            f"no prefill worker is ready (m0: protocol_version: 99 != {PROTOCOL_VERSION})",
        ),
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
    refusal = d.refusal(request)
    assert (refusal.status, refusal.message) == (Status.UNAVAILABLE, message)
    assert str(refusal.because) == message
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
    d.post(LoadReported(busy, ReportedLoad(100, others=LoadPart(num_running=7))))
    for _ in range(6):
        d.arrive()
        place = d.placed()
        assert place.decode is not None
        assert place.decode.worker_id == "d0"


def test_taking_turns_visits_every_pair() -> None:
    d = Driver(policy="round_robin")
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
    assert d.post(DrainAsked(decode)) == [DrainAsked(decode)]
    request = d.arrive()
    assert d.refusal(request).message == "no decode worker is ready (d0: it is draining)"
    d.post(LoadReported(prefill, ReportedLoad(100, draining=True)))
    assert not d.core.is_ready


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
    assert len(d.core.placements._alarms) < 100
