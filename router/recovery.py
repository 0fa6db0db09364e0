"""What becomes of placements that cannot go on: their sequences are placed again, or their request ends.

Invariant: each sequence given up here is placed again, or waits for an alarm or a pair of workers, or its request
ends.
"""

from collections.abc import Callable, Iterable

from pdserve.errors import Status
from pdserve.reports import Failure
from pdserve.router.alarms import Alarms, RetryDue
from pdserve.router.events import AttemptFailed, Limits, LinkId, Refused, Warn
from pdserve.router.grace import PoolGrace
from pdserve.router.losses import Process
from pdserve.router.placement import Decision, Held, Placed, Rejected, Unserved
from pdserve.router.placements import Placements
from pdserve.router.request import Placement, Request
from pdserve.router.view import WorkerView

_BLAMED_ON_PEER = (Failure.PEER_LOST, Failure.TRANSFER_FAILED, Failure.LEASE_LAPSED)
_OURS = (Failure.DIGEST_MISMATCH, Failure.INVALID, Failure.INTERNAL)  # the rest is a want of workers
_LONGEST_DELAY_S = 1.0

Decide = Callable[[Request, tuple[int, ...]], Decision]


class Recovery:
    """Places again what a worker's loss or failure interrupted.

    Failures are bounded in number. Losses of workers are not, as long as the request is not suspected of them.
    """

    def __init__(
        self, placements: Placements, alarms: Alarms, limits: Limits, grace: PoolGrace, decide: Decide
    ) -> None:
        self._placements = placements
        self._alarms = alarms
        self._limits = limits
        self._grace = grace
        self._decide = decide
        self._stranded: list[RetryDue] = []  # wait for a pair of workers, or for what explains their losses

    def lose_worker(self, worker: WorkerView, reason: str, now_s: float) -> None:
        """Forget a worker and place again what it was doing."""
        self._placements.workers.remove(worker.link)
        self._placements.forecast.forget(worker)
        num_lost = len(worker.shares)
        self._placements.emit(Warn(f"lost {worker.name} ({reason}) with {num_lost} placements"))
        process = worker.registration.worker_id, worker.registration.incarnation
        for key in tuple(worker.shares):
            if key not in worker.shares:
                continue  # its request has ended with another of its placements
            request = self._placements.requests[key[0]]
            placement = request.placements[key[1]]
            request.losses.note(process, request.num_delivered, now_s)
            indices = self._give_up(request, placement, {worker.link})
            self._again(request, indices, f"{worker.name} was lost ({reason})", now_s)

    def explain(self, process: Process, now_s: float) -> None:
        """Note that no request ended a process; those that were suspected of it go on."""
        for request in self._placements.requests.values():
            request.losses.explain(process)
        self.retry_stranded(now_s)

    def retry_stranded(self, now_s: float) -> None:
        """Try again what has waited for workers: there may be some now."""
        stranded, self._stranded = self._stranded, []
        for waiting in stranded:
            self.retry(waiting, now_s)

    def take_failure(self, worker: WorkerView, event: AttemptFailed, now_s: float) -> None:
        """Place an attempt again that a worker gave up, a moment later."""
        placement = self._placements.placement_of(worker, event.request_id, event.attempt)
        if placement is None:
            return
        request = self._placements.requests[event.request_id]
        cause = f"{worker.name}: {event.failure.name}: {event.detail}"
        if event.failure is Failure.INVALID:
            self._placements.emit(Warn(f"{request} cannot be served: {cause}"))
            self._placements.end(request, Refused(Status.INTERNAL, cause))
            return
        others = {other.link for other in placement.workers() if other is not worker}
        avoid = others if event.failure in _BLAMED_ON_PEER else {worker.link}
        status = Status.INTERNAL if event.failure in _OURS else Status.UNAVAILABLE
        self.fail(request, placement, Refused(status, cause), avoid, now_s)

    def fail(self, request: Request, placement: Placement, why: Refused, avoid: Iterable[LinkId], now_s: float) -> None:
        """Stop a placement and place its sequences again after a delay; `why` ends the request on the last try.

        INTERNAL counts among the failures of the request's own computing, any other status among interruptions.
        """
        self._placements.emit(Warn(f"{request} attempt {placement.attempt} failed: {why.message}"))
        sequences = [request.sequences[index] for index in self._give_up(request, placement, avoid)]
        for sequence in sequences:
            if why.status is Status.INTERNAL:
                sequence.num_failed += 1
            else:
                sequence.num_interrupted += 1
        num_failed = max(sequence.num_failed for sequence in sequences)
        num_interrupted = max(sequence.num_interrupted for sequence in sequences)
        if num_failed >= self._limits.max_attempts or num_interrupted >= self._limits.max_interruptions:
            num_tries = max(sequence.num_tries for sequence in sequences)
            self._placements.end(request, Refused(why.status, f"{why.message}; placed {num_tries} times"))
            return
        delay_s = min(_LONGEST_DELAY_S, self._limits.retry_delay_s * 2 ** (num_failed + num_interrupted - 1))
        indices = tuple(sequence.index for sequence in sequences)
        self._alarms.add(now_s + delay_s, RetryDue(request.request_id, indices, why.message))

    def retry(self, alarm: RetryDue, now_s: float) -> None:
        request = self._placements.requests.get(alarm.request_id)
        if request is not None:
            waiting = (request.sequences[index] for index in alarm.indices)
            indices = tuple(s.index for s in waiting if not s.ended and s.placement is None)
            self._again(request, indices, alarm.cause, now_s)

    def _give_up(self, request: Request, placement: Placement, avoid: Iterable[LinkId]) -> tuple[int, ...]:
        indices = tuple(sorted(placement.running))
        self._placements.close(request, placement, stop_workers=True)
        request.avoid |= frozenset(avoid)
        request.timeline.start_over()
        return indices

    def _again(self, request: Request, indices: tuple[int, ...], cause: str, now_s: float) -> None:
        for group in request.groups(indices):
            due = RetryDue(request.request_id, group, cause)
            if self._is_suspected(request):
                verdict_s = request.losses.last_s + self._limits.verdict_s
                if now_s >= verdict_s:
                    self._refuse_suspect(request, cause)
                    return
                self._strand(due, verdict_s)
                continue
            decision = self._decide(request, group)
            match decision:
                case Placed():
                    self._placements.place(request, group, decision, now_s)
                case Held():
                    self._alarms.add(now_s + self._limits.retry_delay_s, due)
                case Unserved(reason):
                    until_s = self._grace.until_s(request.wait_for_pair(now_s), now_s)
                    if now_s >= until_s:
                        self._placements.end(request, Refused(Status.UNAVAILABLE, f"{cause}, and {reason}"))
                        return
                    self._strand(due, until_s)
                case Rejected():
                    self._placements.end(request, Refused(decision.status, f"{cause}, and {decision.reason}"))
                    return

    def _strand(self, due: RetryDue, until_s: float) -> None:
        self._stranded.append(due)
        self._alarms.add(until_s, due)

    def _is_suspected(self, request: Request) -> bool:
        losses, limits = request.losses, self._limits
        return losses.num_unexplained >= limits.max_deaths or losses.count >= limits.max_interruptions

    def _refuse_suspect(self, request: Request, cause: str) -> None:
        text = f"{cause}: {request.losses} were lost while they had this request, which is not tried again"
        self._placements.emit(Warn(f"{request} is suspected of ending workers: {text}"))
        self._placements.end(request, Refused(Status.INTERNAL, text))
