"""Nobody who waits is passed over for ever."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdserve.ids import RequestId
from pdserve.router.events import RequestArrived
from pdserve.router.holding import HoldQueue
from pdserve.router.request import Request
from pdserve.sampling import SamplingParams

MAX_TOKENS = 50
TENANTS = ("a", "b", "c")
steps = st.lists(
    st.one_of(st.none(), st.tuples(st.sampled_from(TENANTS), st.integers(1, MAX_TOKENS), st.sampled_from([0.5, 2.0]))),
    max_size=80,
)


def request(number: int, tenant: str, num_tokens: int, slo_s: float) -> Request:
    now_s = float(number)
    event = RequestArrived(
        RequestId(number.to_bytes(16)), (1,) * num_tokens, SamplingParams(), now_s, now_s + 60, 0, tenant, slo_s
    )
    return Request(event, number, now_s)


@given(steps)
def test_a_tenant_that_waits_sees_each_other_served_at_most_its_own_share_and_one_request(
    steps: list[tuple[str, int, float] | None],
) -> None:
    queue = HoldQueue(1000)
    served: Counter[str] = Counter()  # tokens, while all of these wait
    waiting: Counter[str] = Counter()
    for number, step in enumerate(steps):
        if step is not None:
            queue.push(request(number, *step))
            waiting[step[0]] += 1
        elif (first := queue.first()) is not None:
            queue.serve(first)
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
            each = request(number, *step)
            queue.push(each)
            waiting[each.request_id] = each
        elif (first := queue.first()) is not None:
            rivals = [each for each in waiting.values() if each.tenant == first.tenant]
            assert first.first_token_due_s == min(each.first_token_due_s for each in rivals)
            queue.serve(first)
            del waiting[first.request_id]
    drained = queue.drain()
    assert {each.request_id for each in drained} == set(waiting)
