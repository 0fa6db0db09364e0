"""Requests that wait for a place, highest priority first, then in order of arrival."""

from bisect import insort

from pdserve.ids import RequestId
from pdserve.router.request import Request


class HoldQueue:
    """A bounded queue. When full, a request gives way only to one of higher priority."""

    def __init__(self, max_num_held: int) -> None:
        self._max_num_held = max_num_held
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> Request | None:
        """Queue a request; return the one there is no room for, which may be itself."""
        insort(self._requests, request, key=_rank)
        return self._requests.pop() if len(self._requests) > self._max_num_held else None

    def first(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def remove(self, request_id: RequestId) -> Request | None:
        for place, request in enumerate(self._requests):
            if request.request_id == request_id:
                return self._requests.pop(place)
        return None

    def ids(self) -> set[RequestId]:
        return {request.request_id for request in self._requests}

    def drain(self) -> list[Request]:
        """Empty the queue; return what was in it."""
        requests, self._requests = self._requests, []
        return requests


def _rank(request: Request) -> tuple[int, int]:
    return -request.priority, request.arrival
