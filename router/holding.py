"""Requests that wait for a place: highest priority first, then the tenant served least, then the least time left."""

from bisect import insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from pdserve.ids import RequestId
from pdserve.router.fairness import TokenCounters
from pdserve.router.request import Request

_MAX_PASSED = 4  # requests of one tenant that are passed over before the next tenant is looked at


class HoldQueue:
    """A bounded queue. When over its bound, the lowest class gives way, and in it the tenant with the most requests."""

    def __init__(self, max_num_held: int, counters: TokenCounters) -> None:
        self._max_num_held = max_num_held
        self._counters = counters
        self._classes: dict[int, dict[str, list[Request]]] = {}  # by priority, then by tenant, most pressing first
        self._held: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._held)

    def push(self, request: Request) -> None:
        tenants = self._classes.setdefault(request.priority, {})
        insort(tenants.setdefault(request.tenant, []), request, key=_rank)
        self._held[request.request_id] = request
        self._counters.wait(request.counter)

    def remove(self, request_id: RequestId) -> Request | None:
        request = self._held.pop(request_id, None)
        if request is not None:
            tenants = self._classes[request.priority]
            tenants[request.tenant].remove(request)
            if not tenants[request.tenant]:
                del tenants[request.tenant]
            if not tenants:
                del self._classes[request.priority]
            self._counters.stop_waiting(request.counter)
        return request

    def crowd_out(self) -> Request | None:
        """Take out the request for which there is no room, if the queue is over its bound."""
        if len(self._held) <= self._max_num_held:
            return None
        lowest = self._classes[min(self._classes)]
        longest = max(lowest.values(), key=lambda requests: (len(requests), _rank(requests[-1])))
        return self.remove(longest[-1].request_id)

    def in_turn(self, lacks_workers: Callable[[Request], bool] = lambda _: False) -> Iterator[Request]:
        """Yield whose turn it is, and who comes next: after one that was left in the queue, those behind it.

        Of a tenant, a few are passed over at most. Requests are only taken out meanwhile, and only the one yielded.
        `lacks_workers` says which requests no worker can serve whatever room there is: they are left out, uncounted.
        """
        for priority in sorted(self._classes, reverse=True):
            tenants = self._classes[priority]
            turns = [(_turn(requests[0]), tenant, 0, 0) for tenant, requests in tenants.items()]
            heapify(turns)
            while turns:
                _, tenant, place, num_passed = heappop(turns)
                request = tenants[tenant][place]
                is_tried = not lacks_workers(request)
                if is_tried:
                    yield request
                if request.request_id in self._held:
                    place, num_passed = place + 1, num_passed + is_tried
                requests = tenants.get(tenant, ())
                if place < len(requests) and num_passed < _MAX_PASSED:
                    heappush(turns, (_turn(requests[place]), tenant, place, num_passed))

    def drain(self) -> list[Request]:
        """Empty the queue; return what was in it."""
        return [request for request_id in tuple(self._held) if (request := self.remove(request_id)) is not None]


def _rank(request: Request) -> tuple[float, int]:
    """Return a key that sorts first what of one tenant has to be placed first."""
    return request.first_token_due_s, request.arrival


def _turn(request: Request) -> tuple[int, float, int]:
    """Return a key that sorts first what of one class has to be placed first."""
    return request.counter.served, *_rank(request)
