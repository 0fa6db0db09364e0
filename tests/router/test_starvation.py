"""Nobody who waits is passed over for ever."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_driver import LAYOUT, LENGTH, PROMPT, Delta

from pdserve.ids import PROTOCOL_VERSION, Incarnation, RequestId, WorkerId
from pdserve.perfmodel.curve import Step
from pdserve.perfmodel.model import ENOUGH_STEPS
from pdserve.roles import Role
from pdserve.router.commands import End, Finished, Place, Refused
from pdserve.router.config import Limits
from pdserve.router.core import RouterCore
from pdserve.router.events import Event, LinkId, Registration, RequestArrived, StepReported, Tick
from pdserve.router.holding import HoldQueue
from pdserve.router.policies import POLICIES
from pdserve.router.predict import Predictor
from pdserve.router.prefix_index import UNKEYED
from pdserve.router.request import Request
from pdserve.sampling import SamplingParams

MAX_TOKENS = 50
TENANTS = ("a", "b", "c")
steps = st.lists(
    st.one_of(st.none(), st.tuples(st.sampled_from(TENANTS), st.integers(1, MAX_TOKENS), st.sampled_from([0.5, 2.0]))),
    max_size=80,
)


def push(queue: HoldQueue, number: int, terms: tuple[str, int, float]) -> Request:
    tenant, num_tokens, slo_s = terms
    now_s = float(number)
    event = RequestArrived(
        RequestId(number.to_bytes(16)), (1,) * num_tokens, SamplingParams(), now_s, now_s + 60, 0, tenant, slo_s
    )
    request = Request(event, number, queue.counter(tenant), UNKEYED, now_s)
    queue.push(request)
    return request


def serve_first(queue: HoldQueue) -> Request | None:
    first = next(queue.in_turn(), None)
    if first is not None:
        queue.charge_prompt(first)
        queue.remove(first.request_id)
    return first


@given(steps)
def test_a_tenant_that_waits_sees_each_other_served_at_most_its_own_share_and_one_request(
    steps: list[tuple[str, int, float] | None],
) -> None:
    queue = HoldQueue(1000)
    served: Counter[str] = Counter()  # tokens, while all of these wait
    waiting: Counter[str] = Counter()
    for number, step in enumerate(steps):
        if step is not None:
            push(queue, number, step)
            waiting[step[0]] += 1
        elif (first := serve_first(queue)) is not None:
            waiting[first.tenant] -= 1
            served[first.tenant] += first.num_tokens
        if min(waiting[tenant] for tenant in TENANTS) == 0:
            served.clear()  # who comes anew starts level
            continue
        spread = max(served[t] for t in TENANTS) - min(served[t] for t in TENANTS)
        assert spread <= 2 * MAX_TOKENS


@given(steps)
def test_a_request_is_passed_over_only_by_more_pressing_ones_of_its_tenant(
    steps: list[tuple[str, int, float] | None],
) -> None:
    queue, waiting = HoldQueue(1000), dict[RequestId, Request]()
    for number, step in enumerate(steps):
        if step is not None:
            each = push(queue, number, step)
            waiting[each.request_id] = each
        elif (first := serve_first(queue)) is not None:
            rivals = [each for each in waiting.values() if each.tenant == first.tenant]
            assert first.first_token_due_s == min(each.first_token_due_s for each in rivals)
            del waiting[first.request_id]
    drained = queue.drain()
    assert {each.request_id for each in drained} == set(waiting)


Terms = tuple[str, int, float | None]  # tenant, priority, objective for each of both times
P, D = LinkId(1), LinkId(2)
STEP_S = 0.01


class Line:
    """A core that serves two requests at a time, and those who wait for it."""

    def __init__(self, policy: str) -> None:
        predictor = Predictor()
        limits = Limits(max_num_requests=2, max_num_held=1000, worker_silence_s=1e9)
        self.core = RouterCore("m", limits, POLICIES[policy](predictor), predictor)
        self.now_s = 0.0
        self.waiting: dict[RequestId, RequestArrived] = {}
        self.running: list[RequestId] = []
        self.ends: dict[RequestId, Finished | Refused] = {}
        for link, role in ((P, Role.PREFILL), (D, Role.DECODE)):
            process = link, WorkerId(role.value), Incarnation(link), role
            self.post(Registration(*process, PROTOCOL_VERSION, True, "m", LAYOUT, 100, 8, 1000, "a"))
            for _ in range(ENOUGH_STEPS):  # so that a policy may refuse for an objective's sake
                self.post(StepReported(link, [], Step(3, 9) if link == P else Step(0, 0, 1, 4), STEP_S))

    def post(self, event: Event) -> None:
        for command in self.core.handle(event, self.now_s):
            match command:
                case Place(spec):
                    placed = self.waiting.pop(spec.request_id)
                    assert not [each for each in self.waiting.values() if goes_before(each, placed)]
                    self.running.append(spec.request_id)
                case End(request_id, outcome):
                    assert self.ends.setdefault(request_id, outcome) is outcome
                    self.waiting.pop(request_id, None)

    def arrive(self, number: int, terms: Terms) -> None:
        tenant, priority, slo_s = terms
        request_id, params = RequestId(number.to_bytes(16)), SamplingParams(max_tokens=2)
        event = RequestArrived(request_id, PROMPT, params, self.now_s, 1e9, priority, tenant, slo_s, slo_s)
        self.waiting[request_id] = event
        self.post(event)

    def serve_one(self) -> None:
        request_id = self.running.pop(0)
        self.post(StepReported(P, [Delta(request_id, 0, 0, 0, (1,))], Step(3, 9), STEP_S))
        self.post(StepReported(D, [Delta(request_id, 0, 0, 1, (2,), LENGTH)], Step(0, 0, 1, 4), STEP_S))

    def wait(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while (due_s := self.core.next_wakeup_s()) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            self.post(Tick())
        self.now_s = until_s


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
@given(crowds, st.sampled_from([0.0, 0.004, 0.1]))
def test_under_each_policy_nobody_is_passed_over_and_all_are_served_or_refused_for_an_objective(
    policy: str, crowd: list[str | Terms], pause_s: float
) -> None:
    line = Line(policy)
    for number, each in enumerate(crowd):
        line.wait(pause_s)
        if not isinstance(each, str):
            line.arrive(number, each)
        elif line.running:
            line.serve_one()
    for _ in crowd:  # as many turns as there were requests are enough
        if line.running:
            line.serve_one()
        line.wait(0.1)
    arrived = [number for number, each in enumerate(crowd) if not isinstance(each, str)]
    assert {int.from_bytes(request_id) for request_id in line.ends} == set(arrived)
    for request_id, outcome in line.ends.items():
        terms = crowd[int.from_bytes(request_id)]
        assert isinstance(outcome, Finished) or (policy == "goodput" and terms[2] is not None)
    line.core.check_idle()
