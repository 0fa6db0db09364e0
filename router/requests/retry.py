"""Places requests again whose worker was lost or whose attempt failed, or ends them.

Invariant: each sequence given up here is placed again, or waits for an alarm or a pair of workers, or its request
ends.

A request may be what ended the workers it was placed on. A lost worker counts as evidence of that as long as the
request has gained no token since, unless something else ended the process, or the process turns out to live.
"""

from collections.abc import Iterable
from dataclasses import replace

from pdserve.base.ids import Peer
from pdserve.protocol.refusal import Cause, Refused
from pdserve.protocol.reports import Failure
from pdserve.router.config import Limits
from pdserve.router.placement.placements import Placements
from pdserve.router.placement.routing import Held, Placed
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.commands import Warn
from pdserve.router.requests.events import AttemptFailed, LinkId
from pdserve.router.requests.request import Loss, Placement, Request

_BLAMED_ON_PEER = (Failure.PEER_LOST, Failure.TRANSFER_FAILED, Failure.LEASE_LAPSED, Failure.SENDER_GAVE_UP)
_OURS = (Failure.DIGEST_MISMATCH, Failure.INVALID, Failure.INTERNAL)  # the rest is a want of workers
_MAX_UNEXPLAINED = 2  # losses of workers; then a request is suspected of them
_EXPLANATION_S = 5.0  # for a launcher to report what else ended them
_DELAY_S = 0.05  # for each failure so far, before an attempt is placed again
_IN_DOUBT_S = 2.0  # for the target of a move to report what it has, once the source is lost


class Retry:
    """Places again what a worker's loss or failure interrupted.

    Failures are bounded in number. Losses of workers are not, as long as the request is not suspected of them.
    """

    def __init__(self, placements: Placements, limits: Limits) -> None:
        self._placements = placements
        self._limits = limits
        # Continuations that wait for a pair of workers, or for a launcher to report what ended theirs.
        self._waiting: list[tuple[Request, tuple[int, ...]]] = []

    # ---- what went wrong

    def lose_worker(self, worker: WorkerView, reason: str, now_s: float) -> None:
        """Forget a worker and place again what it was doing."""
        self._placements.workers.remove(worker.link)
        self._placements.predictor.forget(worker)
        num_lost = len(worker.shares)
        self._placements.emit(Warn(f"lost {worker.name} ({reason}) with {num_lost} placements"))
        for key in tuple(worker.shares):
            if key not in worker.shares:
                continue  # its request has ended with another of its placements
            request = self._placements.requests[key.request_id]
            if not worker.draining:  # that one was to end
                _note_loss(request, worker.registration.peer, now_s)
            placement = request.placements[key.attempt]
            if self._goes_on(request, placement, worker, now_s):
                continue
            self._note_move(placement, Failure.PEER_LOST, now_s)
            indices = self._give_up(request, placement, {worker.link}, now_s)
            self._again(request, indices, f"{worker.name} was lost ({reason})", now_s)

    def take_failure(self, worker: WorkerView, event: AttemptFailed, now_s: float) -> None:
        """Place an attempt again that a worker gave up, a moment later."""
        placement = self._placements.placement_of(worker, event.request_id, event.attempt)
        if placement is None:
            return
        request = self._placements.requests[event.request_id]
        cause = f"{worker.name}: {event.failure.name}: {event.detail}"
        if self._goes_on(request, placement, worker, now_s):
            return
        if event.failure is Failure.SENDER_GAVE_UP and worker is placement.decode and placement.prefill is not None:
            return  # the prompt's worker is there: its own report of what has ended is on its way
        self._note_move(placement, event.failure, now_s)
        if request.is_shadow(placement):  # it is not, and never will be, admitted there: it goes on where it is
            self._placements.emit(Warn(f"{request} does not move: {cause}", names_request=True))
            if event.failure is not Failure.SENDER_GAVE_UP and placement.decode is not None:
                request.sequences[placement.indices[0]].refused_s[placement.decode.link] = now_s
            self._placements.close(request, placement, stop_workers=worker is placement.source)
            return
        if event.failure is Failure.INVALID:
            self._placements.emit(Warn(f"{request} cannot be served: {cause}", names_request=True))
            structured = request.params.structured_output
            why = Refused(Cause.FAILED, cause)
            if request.params.pooling is not None:
                why = Refused(Cause.INVALID, event.detail)
            if structured is not None:  # nothing goes on with the answer, or it takes too much to find out what does
                why = Refused(Cause.INVALID, f"{structured.field}: {event.detail}")
            self._placements.end_request(request, why)
            return
        others = {other.link for other in placement.workers() if other is not worker}
        avoid = others if event.failure in _BLAMED_ON_PEER else {worker.link}
        ours = Cause.FAILED if event.failure in _OURS else Cause.LOST_WORKERS
        self._fail(request, placement, Refused(ours, cause), avoid, now_s)

    def take_fault(self, worker: WorkerView, request: Request, placement: Placement, fault: str, now_s: float) -> None:
        """Stop a placement of which a worker sent what cannot be, unless it is over."""
        if request.placements.get(placement.attempt) is placement:
            self._note_move(placement, Failure.INTERNAL, now_s)
            why = Refused(Cause.FAILED, f"{worker.name} broke the protocol: {fault}")
            self._fail(request, placement, why, {worker.link}, now_s)

    def _fail(
        self, request: Request, placement: Placement, why: Refused, avoid: Iterable[LinkId], now_s: float
    ) -> None:
        """Stop a placement and place its sequences again after a delay; `why` ends the request on the last try.

        FAILED counts among the failures of the request's own computing, any other cause among interruptions.
        """
        text = f"{request} attempt {placement.attempt} failed: {why.message}"
        self._placements.emit(Warn(text, names_request=True))
        sequences = [request.sequences[index] for index in self._give_up(request, placement, avoid, now_s)]
        if not sequences:
            return
        for sequence in sequences:
            if why.cause is Cause.FAILED:
                sequence.num_failed += 1
            else:
                sequence.num_interrupted += 1
        num_failed = max(sequence.num_failed for sequence in sequences)
        num_interrupted = max(sequence.num_interrupted for sequence in sequences)
        if num_failed >= self._limits.max_attempts or num_interrupted >= self._limits.max_interruptions:
            num_tries = max(sequence.num_tries for sequence in sequences)
            self._placements.end_request(request, replace(why, message=f"{why.message}; placed {num_tries} times"))
            return
        again_s = now_s + _DELAY_S * (num_failed + num_interrupted)
        self._retry_later(request, [sequence.index for sequence in sequences], why.message, again_s)

    def _goes_on(self, request: Request, placement: Placement, lost: WorkerView, now_s: float) -> bool:
        """Let a decode worker that has all it needs go on without the worker that it came from, if that was lost.

        A continuation that ended with its first token was computed by the lost worker alone: if that token has not come
        when those of others have, it never will, and the continuation is placed again.
        """
        if not placement.committed or placement.decode is None or lost not in (placement.prefill, placement.source):
            return False
        if request.awaits_prompt:
            return False  # nobody else has what was lost
        silent = [index for index in placement.indices if not request.sequences[index].has_come]
        if len(silent) == len(placement.indices) > 1:
            return False  # nobody knows which of them the decode worker has
        self._placements.release_prefill(placement)
        placement.decode.prefilled(placement.key)
        if len(placement.indices) > 1 and silent:
            self._placements.part(request, placement, silent)
            self._again(request, tuple(silent), f"{lost.name} was lost with the ends of continuations", now_s)
        return True

    def _note_move(self, placement: Placement, failure: Failure, now_s: float) -> None:
        """Count a move that has failed, if this is one that was not done."""
        if placement.source is not None and not placement.committed:
            self._placements.shadows.note_end(placement, failure.name.lower(), now_s)

    def _give_up(
        self, request: Request, placement: Placement, avoid: Iterable[LinkId], now_s: float
    ) -> tuple[int, ...]:
        """Close a placement; return which of its continuations have no other one.

        A continuation that was moving from here may still arrive: its target takes charge, and reports that within
        _IN_DOUBT_S. One that was moving to here is placed again: its source may have given it up already.
        """
        concerned = placement.indices if request.is_shadow(placement) else tuple(placement.running)
        for sequence in [request.sequences[index] for index in concerned]:
            if sequence.shadow is not None:
                sequence.shadow.commit_due_s = now_s + _IN_DOUBT_S
                self._placements.set_alarm(now_s + _IN_DOUBT_S, request)
                self._placements.take_charge(request, sequence)
        indices = tuple(sorted(placement.running))
        if indices:
            self._placements.close(request, placement, stop_workers=True)
            request.avoid |= frozenset(avoid)
            request.timeline.start_over()
        return indices

    # ---- trying again

    def go_on(self, request: Request, now_s: float) -> None:
        """Place what is left of a request that another router had begun, or end it if nothing is."""
        if request.running:
            self._again(request, request.running, "the request's router was lost", now_s)
        else:
            self._placements.finish(request, now_s)

    def explain(self, process: Peer, now_s: float) -> None:
        """Note that no request ended a process; those that were suspected of it go on."""
        for request in self._placements.requests.values():
            for loss in request.losses:
                if loss.process == process:
                    loss.is_explained = True
        self.retry_waiting(now_s)

    def retry_waiting(self, now_s: float) -> None:
        """Try again what has waited for workers: there may be some now."""
        waiting, self._waiting = self._waiting, []
        for request, indices in waiting:
            if not request.has_ended:
                for index in indices:
                    request.sequences[index].retry_s = now_s
                self.retry(request, now_s)

    def retry(self, request: Request, now_s: float) -> None:
        """Place continuations again that are due, and have neither ended nor been placed meanwhile."""
        self._give_up_doubtful(request, now_s)
        if request.has_ended:
            return
        due = [s for s in request.sequences if not s.ended and s.placement is None and s.retry_s <= now_s]
        if due:
            self._again(request, tuple(sequence.index for sequence in due), due[0].failure, now_s)

    def _give_up_doubtful(self, request: Request, now_s: float) -> None:
        """Give up placements that took charge of a continuation and have not reported that its pages arrived."""
        for placement in tuple(request.placements.values()):
            worker = placement.decode
            if worker is None or placement.committed or now_s < placement.commit_due_s:
                continue
            self._note_move(placement, Failure.PEER_LOST, now_s)
            text = f"{worker.name} has not received what moved to it {_IN_DOUBT_S:g} s after its source was lost"
            self._fail(request, placement, Refused(Cause.LOST_WORKERS, text), {worker.link}, now_s)
            if request.has_ended:
                return

    def _retry_later(self, request: Request, indices: Iterable[int], failure: str, at_s: float) -> None:
        for index in indices:
            request.sequences[index].retry_s, request.sequences[index].failure = at_s, failure
        self._placements.set_alarm(at_s, request)

    def _again(self, request: Request, indices: tuple[int, ...], cause: str, now_s: float) -> None:
        for group in request.groups(indices):
            if self._is_suspected(request):
                until_s = request.losses[-1].at_s + _EXPLANATION_S
                if now_s >= until_s:
                    self._refuse_suspect(request, cause)
                    return
                self._wait(request, group, cause, until_s)
                continue
            match self._placements.decide(request, group, now_s):
                case Placed() as placed:
                    self._placements.place(request, group, placed, now_s)
                case Held(_, until_s) as held if held.lacks_workers:
                    self._wait(request, group, cause, until_s)
                case Held():
                    self._retry_later(request, group, cause, now_s + _DELAY_S)
                case Refused() as why:
                    self._placements.end_request(request, replace(why, message=f"{cause}, and {why.message}"))
                    return

    def _wait(self, request: Request, indices: tuple[int, ...], cause: str, until_s: float) -> None:
        self._waiting.append((request, indices))
        self._retry_later(request, indices, cause, until_s)

    def _is_suspected(self, request: Request) -> bool:
        num_unexplained = sum(not loss.is_explained for loss in request.losses)
        return num_unexplained >= _MAX_UNEXPLAINED or len(request.losses) >= self._limits.max_interruptions

    def _refuse_suspect(self, request: Request, cause: str) -> None:
        lost = " and ".join(loss.process.worker_id for loss in request.losses)
        text = f"{cause}: {lost} were lost while they had this request, which is not tried again"
        self._placements.emit(Warn(f"{request} is suspected of ending workers: {text}", names_request=True))
        self._placements.end_request(request, Refused(Cause.SUSPECT, text))


def _note_loss(request: Request, process: Peer, now_s: float) -> None:
    """Note that a worker was lost while it had a request; forget those lost before its last token."""
    num_tokens = request.num_delivered
    since = [loss for loss in request.losses if loss.num_tokens == num_tokens and loss.process != process]
    request.losses = [*since, Loss(process, num_tokens, now_s)]
