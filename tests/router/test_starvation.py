"""Nobody who waits is passed over for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_driver import LENGTH, Driver

from pdserve.base.ids import RequestId
from pdserve.router.config import Limits
from pdserve.router.placement.policies import POLICIES
from pdserve.router.requests.commands import Command, End, Finished, Place
from pdserve.router.requests.events import Event, RequestArrived

TENANTS = ("a", "b", "c")
Terms = tuple[str, int, float | None]  # tenant, priority, objective for each of both times
STEP_S = 0.01


class Line(Driver):
    """A core that serves two requests at a time, and those who wait for it."""

    def __init__(self, policy: str) -> None:
        super().__init__(Limits(max_num_requests=2, max_num_held=1000, worker_silence_s=1e9), policy=policy)
        self.waiting: dict[RequestId, RequestArrived] = {}
        self.running: list[RequestId] = []
        self.p, self.d = self.pair()
        self.teach(STEP_S / 3, STEP_S)

    def post(self, event: Event) -> list[Command]:
        if isinstance(event, RequestArrived):
            self.waiting[event.request_id] = event
        for command in super().post(event):
            match command:
                case Place(spec):
                    placed = self.waiting.pop(spec.request_id)
                    assert not [each for each in self.waiting.values() if goes_before(each, placed)]
                    self.running.append(spec.request_id)
                case End(request_id):
                    self.waiting.pop(request_id, None)
        return self.last

    def serve_one(self) -> None:
        request = self.running.pop(0)
        self.tokens(self.p, request, 0, 1)
        self.tokens(self.d, request, 1, 2, end=LENGTH)


def goes_before(one: RequestArrived, other: RequestArrived) -> bool:
    """Return whether a request that waits has to be placed before another."""
    if one.priority != other.priority or one.tenant != other.tenant:
        return one.priority > other.priority
    due_s = [each.received_s + (each.ttft_slo_s or 1e9) for each in (one, other)]
    return due_s[0] < due_s[1]


crowds = st.lists(
    st.one_of(
        st.just("serve"),
        st.tuples(st.sampled_from(TENANTS), st.integers(0, 2), st.sampled_from([None, 0.005, 0.5, 5.0])),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(deadline=None)
@given(crowds, st.sampled_from([0.0, 0.004, 0.1]))
def test_under_each_policy_nobody_is_passed_over_and_all_are_served_or_refused_for_an_objective(
    policy: str, crowd: list[str | Terms], pause_s: float
) -> None:
    line, asked = Line(policy), dict[RequestId, Terms]()
    for each in crowd:
        line.run(pause_s)
        if not isinstance(each, str):
            tenant, priority, slo_s = each
            request = line.arrive(priority=priority, deadline_in_s=1e9, tenant=tenant, slo_s=slo_s, max_tokens=2)
            asked[request] = each
        elif line.running:
            line.serve_one()
    for _ in crowd:  # as many turns as there were requests are enough
        if line.running:
            line.serve_one()
        line.run(0.1)
    assert line.ends.keys() == asked.keys()
    for request, outcome in line.ends.items():
        assert isinstance(outcome, Finished) or (policy == "goodput" and asked[request][2] is not None)
    line.core.check_idle()
