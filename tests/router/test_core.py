"""The router's decisions, one by one: where requests go, and how many."""

from dataclasses import replace

import pytest
from router_driver import LAYOUT, Driver, placed_request

from pdserve.base.ids import PROTOCOL_VERSION
from pdserve.base.roles import Role
from pdserve.protocol.refusal import Status
from pdserve.protocol.reports import LoadPart, ReportedLoad
from pdserve.router.config import Limits
from pdserve.router.requests.events import DrainAsked, LoadReported


def test_a_request_goes_to_both_workers_at_once() -> None:
    d, prefill, decode, request = placed_request(n=2)
    place = d.placed()
    assert (place.prefill.link, place.decode and place.decode.link) == (prefill, decode)
    assert place.decode is not None
    assert place.decode.handoff_address == "d0:1"
    assert (place.spec.request_id, place.spec.attempt, place.spec.indices) == (request, 0, (0, 1))
    assert (place.spec.scope.salt, place.spec.remaining_s) == ("salt", 60.0)


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
    d.core.check_idle()


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
