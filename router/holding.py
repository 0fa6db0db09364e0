"""Requests that wait for a place: highest priority first, tenants in turn, then those with the least time left.

Within a class, the tenant goes first that was given the fewest tokens since it has been waiting: fair queueing by
tokens served. A tenant that comes anew starts level with the others, so nobody saves up turns.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.ids import RequestId
from pdserve.router.request import Request


@dataclass(slots=True)
class _Tenant:
    """One tenant's requests of one class, most pressing first."""

    served_tokens: int
    requests: list[Request] = field(default_factory=list)


class HoldQueue:
    """A bounded queue. When full, the lowest class gives way, and in it the tenant with the most requests."""

    def __init__(self, max_num_held: int) -> None:
        self._max_num_held = max_num_held
        self._classes: dict[int, dict[str, _Tenant]] = {}  # by priority, then by tenant
        self._held: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._held)

    def push(self, request: Request) -> Request | None:
        """Queue a request; return the one there is no room for, which may be itself."""
        tenants = self._classes.setdefault(request.priority, {})
        if request.tenant not in tenants:
            level = min((tenant.served_tokens for tenant in tenants.values()), default=0)
            tenants[request.tenant] = _Tenant(level)
        insort(tenants[request.tenant].requests, request, key=_rank)
        self._held[request.request_id] = request
        if len(self._held) <= self._max_num_held:
            return None
        lowest = self._classes[min(self._classes)]
        longest = max(lowest.values(), key=lambda tenant: (len(tenant.requests), _rank(tenant.requests[-1])))
        return self.remove(longest.requests[-1].request_id)

    def first(self) -> Request | None:
        """Return whose turn it is."""
        if not self._classes:
            return None
        tenants = self._classes[max(self._classes)]
        return min(tenants.values(), key=lambda tenant: (tenant.served_tokens, _rank(tenant.requests[0]))).requests[0]

    def serve(self, request: Request) -> None:
        """Take out a request that was given a place."""
        self._classes[request.priority][request.tenant].served_tokens += request.num_tokens
        self.remove(request.request_id)

    def remove(self, request_id: RequestId) -> Request | None:
        request = self._held.pop(request_id, None)
        if request is not None:
            tenants = self._classes[request.priority]
            tenants[request.tenant].requests.remove(request)
            if not tenants[request.tenant].requests:
                del tenants[request.tenant]
            if not tenants:
                del self._classes[request.priority]
        return request

    def ids(self) -> set[RequestId]:
        return set(self._held)

    def drain(self) -> list[Request]:
        """Empty the queue; return what was in it."""
        requests = list(self._in_turn())
        self._held.clear()
        self._classes.clear()
        return requests

    def _in_turn(self) -> Iterator[Request]:
        for priority in sorted(self._classes, reverse=True):
            tenants = self._classes[priority].values()
            yield from sorted((request for tenant in tenants for request in tenant.requests), key=_rank)


def _rank(request: Request) -> tuple[float, int]:
    """Return a key that sorts first what has to be placed first."""
    return request.first_token_due_s, request.arrival
