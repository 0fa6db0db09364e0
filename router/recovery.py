"""What becomes of placements that cannot go on: their sequences are placed again, or their request ends."""

from collections.abc import Callable, Iterable

from pdserve.errors import Status
from pdserve.router.alarms import Alarms, RetryDue
from pdserve.router.book import Book
from pdserve.router.events import AttemptFailed, Complain, Failure, Limits, LinkId, Refused
from pdserve.router.placement import Decision, Held, Placed, Rejected
from pdserve.router.request import Placement, Request
from pdserve.router.view import WorkerView

_BLAMED_ON_PEER = (Failure.PEER_LOST, Failure.TRANSFER_FAILED)
_OURS = (Failure.DIGEST_MISMATCH, Failure.INVALID, Failure.INTERNAL)  # the rest is a want of workers

Decide = Callable[[Request, tuple[int, ...]], Decision]


class Recovery:
    """Places again what a worker's loss or failure interrupted, a bounded number of times."""

    def __init__(self, book: Book, alarms: Alarms, limits: Limits, decide: Decide) -> None:
        self._book = book
        self._alarms = alarms
        self._limits = limits
        self._decide = decide

    def lose_worker(self, worker: WorkerView, reason: str, now_s: float) -> None:
        """Forget a worker and place again what it was doing."""
        self._book.workers.remove(worker.link)
        self._book.forecast.forget(worker)
        num_lost = len(worker.shares)
        self._book.tell(Complain(f"lost {worker.name} ({reason}) with {num_lost} placements"))
        for key in tuple(worker.shares):
            if key not in worker.shares:
                continue  # its request has ended with another of its placements
            request = self._book.requests[key[0]]
            placement = request.placements[key[1]]
            indices = self._give_up(request, placement, {worker.link})
            self._again(request, indices, f"{worker.name} was lost ({reason})", now_s)

    def take_failure(self, worker: WorkerView, event: AttemptFailed, now_s: float) -> None:
        """Place an attempt again that a worker gave up, a moment later."""
        placement = self._book.placement_of(worker, event.request_id, event.attempt)
        if placement is None:
            return
        request = self._book.requests[event.request_id]
        cause = f"{worker.name}: {event.failure.name}: {event.detail}"
        if event.failure is Failure.INVALID:
            self._book.tell(Complain(f"{request} cannot be served: {cause}"))
            self._book.end(request, Refused(Status.INTERNAL, cause))
            return
        others = {other.link for other in placement.workers() if other is not worker}
        avoid = others if event.failure in _BLAMED_ON_PEER else {worker.link}
        status = Status.INTERNAL if event.failure in _OURS else Status.UNAVAILABLE
        self.fail(request, placement, Refused(status, cause), avoid, now_s)

    def fail(self, request: Request, placement: Placement, why: Refused, avoid: Iterable[LinkId], now_s: float) -> None:
        """Stop a placement and place its sequences again after a delay; `why` ends the request on the last try."""
        self._book.tell(Complain(f"{request} attempt {placement.attempt} failed: {why.message}"))
        indices = self._give_up(request, placement, avoid)
        num_tries = max(request.sequences[index].num_tries for index in indices)
        if num_tries >= self._limits.max_attempts:
            self._book.end(request, Refused(why.status, f"{why.message}; placed {num_tries} times"))
            return
        delay_s = self._limits.retry_delay_s * 2 ** (num_tries - 1)
        self._alarms.add(now_s + delay_s, RetryDue(request.request_id, indices, why.message))

    def retry(self, alarm: RetryDue, now_s: float) -> None:
        request = self._book.requests.get(alarm.request_id)
        if request is not None:
            waiting = (request.sequences[index] for index in alarm.indices)
            indices = tuple(s.index for s in waiting if not s.ended and s.placement is None)
            self._again(request, indices, alarm.cause, now_s)

    def _give_up(self, request: Request, placement: Placement, avoid: Iterable[LinkId]) -> tuple[int, ...]:
        indices = tuple(sorted(placement.running))
        self._book.close(request, placement, stop_workers=True)
        request.avoid |= frozenset(avoid)
        request.ladder.start_over()
        return indices

    def _again(self, request: Request, indices: tuple[int, ...], cause: str, now_s: float) -> None:
        for group in request.groups(indices):
            num_tries = request.sequences[group[0]].num_tries
            if num_tries >= self._limits.max_attempts:
                why = Refused(Status.UNAVAILABLE, f"{cause}; placed {num_tries} times")
                self._book.end(request, why)
                return
            decision = self._decide(request, group)
            match decision:
                case Placed():
                    self._book.place(request, group, decision, now_s)
                case Held():
                    due_s = now_s + self._limits.retry_delay_s
                    self._alarms.add(due_s, RetryDue(request.request_id, group, cause))
                case Rejected():
                    why = Refused(decision.status, f"{cause}, and {decision.reason}")
                    self._book.end(request, why)
                    return
