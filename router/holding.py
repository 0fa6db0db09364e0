"""Requests that wait for a place: highest priority first, then the tenant served least, then the least time left.

Which tenant was served least is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024): each served token is charged to its tenant, and among those that wait the one with the smallest counter is
next. A tenant that had nothing waiting is lifted to the others' level when it comes again, so nobody saves up a claim
while away; a counter is never lowered, so no debt is forgotten while its tenant is known.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from pdserve.ids import RequestId
from pdserve.router.request import Counter, Request

MAX_TENANTS = 4096  # with a counter, besides those that wait
_MAX_PASSED = 4  # requests of one tenant that are passed over before the next tenant is looked at


class HoldQueue:
    """A bounded queue. When over its bound, the lowest class gives way, and in it the tenant with the most requests."""

    def __init__(self, max_num_held: int) -> None:
        self._max_num_held = max_num_held
        self._classes: dict[int, dict[str, list[Request]]] = {}  # by priority, then by tenant, most pressing first
        self._held: dict[RequestId, Request] = {}
        self._counters: dict[str, Counter] = {}  # by tenant; one without stands at the level of the last one served
        self._last = Counter()  # of the tenant that was charged last

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._held.values())

    def find(self, request_id: RequestId) -> Request | None:
        return self._held.get(request_id)

    def push(self, request: Request) -> None:
        tenants = self._classes.setdefault(request.priority, {})
        insort(tenants.setdefault(request.tenant, []), request, key=_rank)
        self._held[request.request_id] = request

    def remove(self, request_id: RequestId) -> Request | None:
        request = self._held.pop(request_id, None)
        if request is not None:
            tenants = self._classes[request.priority]
            tenants[request.tenant].remove(request)
            if not tenants[request.tenant]:
                del tenants[request.tenant]
            if not tenants:
                del self._classes[request.priority]
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

    # ---- tenants

    @property
    def num_tenants(self) -> int:
        return len(self._counters)

    def counter(self, tenant: str) -> Counter:
        """Return the counter of a tenant of which a request has come; lift it if no other one waits."""
        waiting = {each: requests[0].counter for one in self._classes.values() for each, requests in one.items()}
        counter = self._counters.get(tenant)
        if counter is None:
            if len(self._counters) >= MAX_TENANTS + len(waiting):
                self._forget_some(waiting)
            counter = self._counters[tenant] = Counter()
        if tenant not in waiting:
            level = min([other.served for other in waiting.values()], default=self._last.served)
            counter.served = max(counter.served, level)
        return counter

    def charge_prompt(self, request: Request) -> None:
        """Charge a request that is placed for its prompt; its answer is charged as it comes."""
        request.counter.served += request.num_tokens
        self._last = request.counter

    def _forget_some(self, waiting: dict[str, Counter]) -> None:
        """Keep those that wait and, of the rest, the half with the largest counters: the others would be lifted."""
        rest = [(tenant, counter) for tenant, counter in self._counters.items() if tenant not in waiting]
        rest.sort(key=lambda each: each[1].served, reverse=True)
        self._counters = waiting | dict(rest[: MAX_TENANTS // 2])

    def drain(self) -> list[Request]:
        return [request for request_id in tuple(self._held) if (request := self.remove(request_id)) is not None]


def _rank(request: Request) -> tuple[float, int]:
    """Return a key that sorts first what of one tenant has to be placed first."""
    return request.first_token_due_s, request.arrival


def _turn(request: Request) -> tuple[int, float, int]:
    """Return a key that sorts first what of one class has to be placed first."""
    return request.counter.served, *_rank(request)
