"""The queue of requests that wait: by class, tenant and the time that is left."""

from pdserve.ids import RequestId
from pdserve.router.events import (
    RequestArrived,
)
from pdserve.router.holding import HoldQueue
from pdserve.router.request import Request
from pdserve.sampling import SamplingParams


def held(number: int, *, priority: int = 0, tenant: str = "", ttft_s: float | None = None, tokens: int = 10) -> Request:
    event = RequestArrived(
        RequestId(number.to_bytes(16)), [1] * tokens, SamplingParams(), 0.0, 60.0, priority, tenant, ttft_s
    )
    return Request(event, number, 0.0)


def drained(queue: HoldQueue) -> list[int]:
    order = []
    while (request := queue.first()) is not None:
        order.append(request.arrival)
        queue.serve(request)
    return order


def test_the_least_time_left_goes_first_and_the_highest_class_before_all() -> None:
    queue = HoldQueue(10)
    for request in (held(1), held(2, ttft_s=3.0), held(3, ttft_s=1.0), held(4, priority=1)):
        assert queue.push(request) is None
    assert drained(queue) == [4, 3, 2, 1]


def test_tenants_share_by_tokens_not_by_requests() -> None:
    queue = HoldQueue(100)
    for number in range(10):
        queue.push(held(number, tenant="long", tokens=100))
    for number in range(10, 40):
        queue.push(held(number, tenant="short", tokens=20))
    first = drained(queue)[:18]
    num_long = sum(number < 10 for number in first)
    assert num_long == 3
    assert len(first) - num_long == 15


def test_a_full_queue_sheds_the_lowest_class_and_in_it_the_greediest_tenant() -> None:
    queue = HoldQueue(3)
    for request in (held(1, tenant="a"), held(2, tenant="b"), held(3, tenant="b")):
        queue.push(request)
    shed = queue.push(held(4, priority=1))
    assert shed is not None
    assert shed.arrival == 3
    shed = queue.push(held(5, priority=-1))
    assert shed is not None
    assert shed.arrival == 5
