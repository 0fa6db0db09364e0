"""Which workers are attached: they register, fall silent, leave, end, and follow one another under one name.

Invariant: a worker is among those attached from its registration until its link is lost or dropped, and what it was
doing is then placed again; no process is attached that is known to have ended, or to have a successor. That a later
process of the same name attaches proves that the earlier one has ended only if the later one started after the earlier
one was last heard, and did not find it attached.
"""

from math import inf

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.processes import KnownProcesses
from pdserve.base.roles import Role
from pdserve.router.config import Limits
from pdserve.router.placement.placements import Placements
from pdserve.router.placement.routing import peerless
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.admission import Admission
from pdserve.router.requests.commands import DropLink, SendProcessGone, Warn
from pdserve.router.requests.events import LinkId, ProcessEnded, Registration
from pdserve.router.requests.recent import Kind
from pdserve.router.requests.retry import Retry

_MAX_ENDED = 64  # processes, for workers that attach later
_READING_S = 0.25  # between two looks at a silent worker: what it has sent is read meanwhile


class Membership:
    """Keeps the attached workers, reports ended processes to all of them, and wakes what waits when workers change."""

    def __init__(self, placements: Placements, retry: Retry, admission: Admission, limits: Limits) -> None:
        self._placements = placements
        self._workers = placements.workers
        self._retry = retry
        self._admission = admission
        self._limits = limits
        self._processes = KnownProcesses(_MAX_ENDED)
        self.silence_due_s = inf  # when `drop_silent` is to look next
        self._looked_s = -inf  # when workers were last looked at
        self.has_pair = False  # some pair of workers could serve a request now

    # ---- who can serve

    def unroutable(self) -> dict[LinkId, str]:
        """Return why nothing is placed on each worker; empty when things are."""
        known: dict[tuple[Role, int], str] = {}
        return {worker.link: self._unroutable(worker, known) for worker in self._workers}

    def _unroutable(self, worker: WorkerView, known: dict[tuple[Role, int], str]) -> str:
        """Return why nothing is placed on a worker. `known` is what was found of workers of its role and kind."""
        reason = self._workers.unroutable(worker)
        if reason or (self._limits.local_prefill and worker.role is Role.DECODE):
            return reason
        kind = worker.role, worker.kind
        if kind not in known:
            known[kind] = peerless(self._workers, worker)
        return known[kind]

    def note_change(self, now_s: float) -> None:
        """Note that workers came, went or began to drain; serve what waits for a pair if there is one.

        A prefill worker alone serves requests that their first token ends.
        """
        self._placements.workers_changed_s = now_s
        self.has_pair = any(not self._unroutable(worker, {}) for worker in self._workers)
        if self.has_pair:
            self._retry.retry_waiting(now_s)
            self._admission.look_soon(now_s)
        elif self._workers.routable(Role.PREFILL):
            self._admission.look_soon(now_s)

    # ---- workers that come

    def register(self, registration: Registration, now_s: float) -> None:
        link = registration.link
        worker = self._workers.get(link)
        before = None if worker is None else worker.registration
        if worker is None:
            refusal = self._processes.refusal(registration.peer)
            if refusal:
                self._placements.emit(Warn(f"{registration.worker_id} is refused: {refusal}"))
                self._placements.emit(DropLink(link, refusal, PeerFault.INCARNATION))
                return
            self._drop_namesake(registration, now_s)
        try:
            registered = self._workers.register(registration, now_s)
        except ProtocolError as error:
            self.drop(self._workers.known(link), str(error), now_s, error.refusal)
            return
        self._note_news(registered, before)
        registered.last_heard_s = now_s
        self._placements.predictor.prefixes.attach(link, registration.layout.page_size, registration.num_pages)
        self.silence_due_s = min(self.silence_due_s, now_s + self._limits.worker_silence_s - _READING_S)
        if worker is None:
            self._welcome(registered, now_s)
        self.note_change(now_s)

    def _note_news(self, worker: WorkerView, before: Registration | None) -> None:
        registration, recent = worker.registration, self._placements.recent
        if before is None:
            recent.note(Kind.ATTACHED, worker.name, f"attached as a {worker.role} worker")
        elif before.role is not registration.role:
            recent.note(Kind.ROLE, worker.name, f"from {before.role} to {worker.role}")
        if registration.ready and (before is None or not before.ready):
            recent.note(Kind.READY, worker.name, "ready for requests")

    def _drop_namesake(self, registration: Registration, now_s: float) -> None:
        """Drop who is attached under a name that attaches. If that is an earlier process, it must end."""
        namesake = self._workers.named(registration.worker_id)
        if namesake is None:
            return
        if namesake.registration.incarnation == registration.incarnation:
            self.drop(namesake, "its name attached again", now_s)
        else:
            namesake.last_heard_s = inf  # it may live on: the later process does not prove that it has ended
            self.drop(namesake, "a later process of its name has attached", now_s, PeerFault.INCARNATION)

    def _welcome(self, worker: WorkerView, now_s: float) -> None:
        """Tell a worker that has attached which processes have ended, and all whether its predecessor has."""
        process = worker.registration.peer
        self._retry.explain(process, now_s)  # it lives
        for ended in self._processes.ended():
            self._placements.emit(SendProcessGone(worker.link, ended))
        predecessor = self._processes.note_attached(process, now_s - worker.registration.age_s, now_s)
        if predecessor is not None:
            self.note_ended(ProcessEnded(predecessor), now_s)

    # ---- workers that go

    def lose(self, worker: WorkerView, reason: str, now_s: float) -> None:
        """Take note that a worker's link is over."""
        self._processes.note_heard(worker.registration.peer, worker.last_heard_s)
        self._placements.workers_changed_s = now_s  # what it was doing may wait for another one from now on
        self._retry.lose_worker(worker, reason, now_s)
        self.note_change(now_s)

    def drop(self, worker: WorkerView, reason: str, now_s: float, refusal: PeerFault | None = None) -> None:
        """End a worker's link; `refusal` says what is wrong with the worker, if something is."""
        self._placements.emit(DropLink(worker.link, reason, refusal))
        self.lose(worker, reason, now_s)

    def drop_silent(self, now_s: float) -> None:
        """Drop the workers that have sent nothing for too long.

        If this process stood still, their messages may wait to be read. So a worker is dropped only if it was silent
        when this process last looked, too: what it had sent was read since.
        """
        if now_s < self.silence_due_s:
            return
        limit_s, looked_s = self._limits.worker_silence_s, self._looked_s
        self._looked_s = now_s
        for worker in tuple(self._workers):
            due_s = worker.last_heard_s + limit_s
            if worker.registration.ready and looked_s >= due_s - _READING_S and now_s >= due_s:
                self.drop(worker, f"silent for {now_s - worker.last_heard_s:.1f} s", now_s)
        # A worker that loads is busy with that; its stream's end is enough to notice its own.
        heard_s = min([worker.last_heard_s for worker in self._workers if worker.registration.ready], default=inf)
        first_look_s = heard_s + limit_s - _READING_S
        self.silence_due_s = first_look_s if now_s < first_look_s else now_s + _READING_S

    def note_ended(self, event: ProcessEnded, now_s: float) -> None:
        """Take the proof that a process has ended, and report it to all workers, now and later."""
        self._processes.note_ended(event.process)
        worker = self._workers.named(event.process.worker_id)
        if worker is not None and worker.registration.peer == event.process:
            self.drop(worker, "its process is known to have ended", now_s, PeerFault.INCARNATION)
        if event.from_outside:  # after its loss is noted, of which this may be the first sign
            self._retry.explain(event.process, now_s)
        for survivor in self._workers:
            self._placements.emit(SendProcessGone(survivor.link, event.process))
