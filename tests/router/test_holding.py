"""The queue of requests that wait: by class, by what tenants were served, and by the time that is left."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.ids import RequestId
from pdserve.protocol.sampling import SamplingParams
from pdserve.router.placement.prefix_index import UNKEYED
from pdserve.router.requests.admission import MAX_TENANTS, HoldQueue
from pdserve.router.requests.events import RequestArrived
from pdserve.router.requests.request import OUTPUT_WEIGHT, Request


class Queue:
    """A queue, and how many requests were put in it."""

    def __init__(self, max_num_held: int = 1000) -> None:
        self.queue = HoldQueue(max_num_held)
        self.count = 0

    def push(
        self, tenant: str = "", *, priority: int = 0, ttft_s: float | None = None, tokens: int = 10, now_s: float = 0.0
    ) -> Request:
        event = RequestArrived(
            request_id=RequestId(self.count.to_bytes(16)),
            token_ids=[1] * tokens,
            params=SamplingParams(),
            received_s=now_s,
            deadline_s=now_s + 60.0,
            priority=priority,
            tenant=tenant,
            ttft_slo_s=ttft_s,
        )
        request = Request(event, self.count, self.queue.counter(tenant), UNKEYED, now_s)
        self.count += 1
        self.queue.push(request)
        return request

    def serve(self, output_tokens: int = 0) -> Request | None:
        """Place whose turn it is."""
        request = next(self.queue.in_turn(), None)
        if request is not None:
            self.queue.charge_prompt(request)
            request.counter.served += OUTPUT_WEIGHT * output_tokens
            self.queue.remove(request.request_id)
        return request

    def order(self) -> list[Request]:
        return list(iter(self.serve, None))


def test_the_least_time_left_goes_first_and_the_highest_class_before_all() -> None:
    q = Queue()
    late, soon, urgent = q.push(ttft_s=3.0), q.push(ttft_s=1.0), q.push(priority=1)
    never = q.push()
    assert q.order() == [urgent, soon, late, never]


def test_tenants_share_by_tokens_not_by_requests() -> None:
    q = Queue()
    for _ in range(10):
        q.push("long", tokens=100)
    for _ in range(30):
        q.push("short", tokens=20)
    first = q.order()[:18]
    assert [request.tenant for request in first].count("long") == 3


def test_tokens_of_answers_count_double() -> None:
    q = Queue()
    for _ in range(2):
        q.push("talks", tokens=10)
        q.push("reads", tokens=10 + OUTPUT_WEIGHT * 45)
    first = q.serve(output_tokens=50)
    second = q.serve()
    assert (first and first.tenant, second and second.tenant) == ("talks", "reads")
    third = q.serve()
    assert third is not None
    assert third.tenant == "reads", "100 tokens read weigh less than 10 read and 50 answered"


def test_what_a_tenant_was_served_is_remembered_when_its_queue_empties() -> None:
    q = Queue()
    q.push("greedy", tokens=1000)
    q.push("modest", tokens=10)
    q.order()
    modest = [q.push("modest", tokens=10) for _ in range(20)]
    greedy = q.push("greedy", tokens=1000)
    assert q.order() == [*modest, greedy]


def test_what_a_tenant_was_served_counts_in_every_class() -> None:
    q = Queue()
    q.push("greedy", priority=1, tokens=1000)
    q.push("modest", tokens=10)
    assert q.serve() is not None
    greedy, modest = q.push("greedy", tokens=10), q.push("modest", tokens=10)
    order = q.order()
    assert order.index(modest) < order.index(greedy)


def test_one_tenants_requests_that_cannot_be_placed_hide_no_other_tenants() -> None:
    q = Queue()
    for _ in range(50):
        q.push("large", ttft_s=1.0)
    small = q.push("small")
    assert small in list(q.queue.in_turn())[:8]


def test_a_full_queue_sheds_the_lowest_class_and_in_it_the_tenant_with_the_most_requests() -> None:
    q = Queue(3)
    q.push("a")
    q.push("b")
    last = q.push("b")
    assert q.queue.crowd_out() is None
    q.push(priority=1)
    assert q.queue.crowd_out() is last
    low = q.push(priority=-1)
    assert q.queue.crowd_out() is low


def test_the_table_of_tenants_is_bounded_and_debts_outlast_it() -> None:
    q = Queue()
    q.push("greedy", tokens=10_000)
    waits = q.push("waits", tokens=10_000, priority=-1)
    assert q.serve() is not waits
    for number in range(2 * MAX_TENANTS):
        q.push(f"tenant {number}", tokens=1)
        q.serve()
        assert len(q.queue._counters) <= MAX_TENANTS + len(q.queue)
    greedy, other = q.push("greedy"), q.push("tenant 1")
    assert next(q.queue.in_turn()) is other
    assert q.order()[-2:] == [greedy, waits]


Step = tuple[str, int, float]  # a request comes: its tenant, tokens and objective
MAX_TOKENS = 50
TENANTS = ("a", "b", "c")
steps = st.lists(
    st.one_of(st.none(), st.tuples(st.sampled_from(TENANTS), st.integers(1, MAX_TOKENS), st.sampled_from([0.5, 2.0]))),
    max_size=80,
)


def push(q: Queue, number: int, step: Step) -> Request:
    tenant, num_tokens, slo_s = step
    return q.push(tenant, tokens=num_tokens, ttft_s=slo_s, now_s=float(number))


@given(steps)
def test_a_tenant_that_waits_sees_each_other_served_at_most_its_own_share_and_one_request(
    steps: list[Step | None],
) -> None:
    q = Queue()
    served: Counter[str] = Counter()  # tokens, while all of these wait
    waiting: Counter[str] = Counter()
    for number, step in enumerate(steps):
        if step is not None:
            push(q, number, step)
            waiting[step[0]] += 1
        elif (first := q.serve()) is not None:
            waiting[first.tenant] -= 1
            served[first.tenant] += first.num_tokens
        if min(waiting[tenant] for tenant in TENANTS) == 0:
            served.clear()  # who comes anew starts level
            continue
        spread = max(served[t] for t in TENANTS) - min(served[t] for t in TENANTS)
        assert spread <= 2 * MAX_TOKENS


@given(steps)
def test_a_request_is_passed_over_only_by_more_pressing_ones_of_its_tenant(
    steps: list[Step | None],
) -> None:
    q, waiting = Queue(), dict[RequestId, Request]()
    for number, step in enumerate(steps):
        if step is not None:
            each = push(q, number, step)
            waiting[each.request_id] = each
        elif (first := q.serve()) is not None:
            rivals = [each for each in waiting.values() if each.tenant == first.tenant]
            assert first.first_token_due_s == min(each.first_token_due_s for each in rivals)
            del waiting[first.request_id]
    assert {each.request_id for each in q.queue} == set(waiting)
