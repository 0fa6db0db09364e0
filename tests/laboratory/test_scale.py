"""The load of a scaling measurement, and the table of what came of it."""

from dataclasses import replace

from lab.scale import Moment, ScaleFindings, ScalePlan, arrivals, charts, orders, phase_results, phases
from pdserve.base.roles import Role
from pdserve.measure.known_answers import KnownRequest
from pdserve.measure.outcomes import OK, Objective, Outcome
from pdserve.protocol.sampling import SamplingParams

PLAN = ScalePlan(phases(5.0, 200, 100), 100.0, Objective(1.0, 0.1), distinct=2)


def test_each_phase_sends_its_own_requests_in_turn_at_about_its_rate() -> None:
    requests = [[KnownRequest((phase, turn), SamplingParams(), {}) for turn in range(2)] for phase in range(4)]
    sent = arrivals(PLAN, requests)
    assert [at_s for at_s, _, _ in sent] == sorted(at_s for at_s, _, _ in sent)
    for number, phase in enumerate(PLAN.phases):
        here = [(at_s, request) for at_s, of, request in sent if of == number]
        assert all(number * 100 <= at_s < (number + 1) * 100 for at_s, _ in here)
        assert abs(len(here) - 100 * phase.rate) < 4 * (100 * phase.rate) ** 0.5
        assert [request.prompt for _, request in here[:3]] == [(number, 0), (number, 1), (number, 0)]


def test_a_phase_has_what_its_clients_saw_and_the_replicas_that_served_and_orders_are_told() -> None:
    good = Outcome(0.0, 10, 2, status=OK, num_tokens=2, first_s=0.5, last_s=0.55, ended_s=0.6)
    late, wrong = replace(good, first_s=2.0, last_s=2.1), replace(good, wrong="token 1")
    refused, failed = replace(good, status="RESOURCE_EXHAUSTED"), replace(good, status="UNAVAILABLE")
    moments = [
        Moment(at_s, {Role.PREFILL: 1, Role.DECODE: 1 + (at_s > 50), Role.MIXED: 0}, 0, 0) for at_s in (1, 99, 150)
    ]
    decisions = ((1.0, "decode: hold; 1 of 1 replicas"), (2.0, "decode: add decode-1; 1 of 2 replicas"))
    found = ScaleFindings(PLAN, ((good, late, wrong, refused, failed), (), (), ()), tuple(moments), decisions)
    quiet = phase_results(found)[0]
    assert (quiet["name"], quiet["num_requests"], quiet["refused"], quiet["attainment"]) == ("quiet", 5, 0.2, 0.2)
    assert (quiet["prefill_replicas"], quiet["decode_replicas"]) == (1.0, 1.5)
    assert quiet["failures"] == {"WRONG": 1, "RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert orders(found) == ["   2.0 s  decode: add decode-1; 1 of 2 replicas"]
    assert [list(line.points) for line in charts(found)[0].lines] == [
        [(1, 1), (99, 1), (150, 1)],
        [(1, 1), (99, 2), (150, 2)],
    ]
