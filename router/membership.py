"""Which workers are attached: they register, fall silent, leave, end, and follow one another under one name.

Invariant: a worker is among those attached from its registration until its link is lost or dropped, and what it was
doing is then placed again; no process is attached that is known to have ended, or to have a successor; and none is
taken for ended because of another one that started before it, or before it was last heard, or that found it attached.
"""

from math import inf

from pdserve.errors import ProtocolError, Refusal
from pdserve.router.census import Census
from pdserve.router.events import (
    DropLink,
    Limits,
    LinkId,
    ProcessEnded,
    Registration,
    Role,
    SendProcessGone,
    Warn,
    WorkerRegistered,
)
from pdserve.router.grace import PoolGrace
from pdserve.router.placement import peerless
from pdserve.router.placements import Placements
from pdserve.router.recovery import Recovery
from pdserve.router.view import WorkerView


class Membership:
    """Keeps the attached workers, and tells the others who has ended."""

    def __init__(self, placements: Placements, recovery: Recovery, grace: PoolGrace, limits: Limits) -> None:
        self._placements = placements
        self._workers = placements.workers
        self._recovery = recovery
        self._grace = grace
        self._limits = limits
        self._census = Census()
        self.may_serve_more = False  # workers have come, gone or changed, and some can serve; read by the core
        self.silence_due_s = inf  # no worker has been silent too long before that

    @property
    def has_pair(self) -> bool:
        """Whether some pair of workers could serve a request now."""
        return any(not self._unroutable(worker, {}) for worker in self._workers)

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

    def register(self, event: WorkerRegistered, now_s: float) -> None:
        link, told = event.link, event.registration
        if self._workers.get(link) is None:
            self._attach(link, told, now_s)
            return
        try:
            worker = self._workers.register(link, told, now_s)
        except ProtocolError as error:
            self.drop(self._workers.known(link), str(error), now_s, error.refusal)
            return
        worker.last_heard_s = now_s
        self._note_size(worker)
        self._watch(now_s)
        self.note_change(now_s)

    def _attach(self, link: LinkId, told: Registration, now_s: float) -> None:
        why_not = self._census.why_not(told.worker_id, told.incarnation)
        if why_not:
            self._placements.emit(Warn(f"{told.worker_id} is refused: {why_not}"))
            self._placements.emit(DropLink(link, why_not, Refusal.INCARNATION))
            return
        self._take_place(told, now_s)
        worker = self._workers.register(link, told, now_s)
        self._note_size(worker)
        self._watch(now_s)
        self._welcome(worker, now_s)
        before = self._census.note_attached(told.worker_id, told.incarnation, now_s - told.age_s)
        if before is not None:
            self.note_ended(ProcessEnded(told.worker_id, before), now_s)
        self.note_change(now_s)

    def _take_place(self, told: Registration, now_s: float) -> None:
        """Drop who is attached under a name that attaches. If that is an earlier process, it must end."""
        namesake = self._workers.named(told.worker_id)
        if namesake is None:
            return
        if namesake.registration.incarnation == told.incarnation:
            self.drop(namesake, "its name attached again", now_s)
        else:
            namesake.last_heard_s = now_s  # for all that is known, it is there
            self.drop(namesake, "a later process of its name has attached", now_s, Refusal.INCARNATION)

    def _welcome(self, worker: WorkerView, now_s: float) -> None:
        """Tell a worker which processes have ended."""
        self._recovery.explain((worker.registration.worker_id, worker.registration.incarnation), now_s)  # it lives
        for process in self._census.ended():
            self._placements.emit(SendProcessGone(worker.link, *process))

    def _note_size(self, worker: WorkerView) -> None:
        """Let the prefix table have room for all that a worker's pages can hold."""
        told = worker.registration
        self._placements.forecast.prefixes.attach(worker.link, told.num_pages * told.layout.page_size)

    def _watch(self, now_s: float) -> None:
        """See to it that a worker which has just spoken is looked for when it has been silent for too long."""
        self.silence_due_s = min(self.silence_due_s, now_s + self._limits.worker_silence_s)

    def lose(self, worker: WorkerView, reason: str, now_s: float) -> None:
        """Take note that a worker's link is over."""
        told = worker.registration
        self._census.note_left(told.worker_id, told.incarnation, worker.last_heard_s)
        self._recovery.lose_worker(worker, reason, now_s)
        self.note_change(now_s)

    def drop(self, worker: WorkerView, reason: str, now_s: float, refusal: Refusal | None = None) -> None:
        """End a worker's link; `refusal` says what is wrong with the worker, if something is."""
        self._placements.emit(DropLink(worker.link, reason, refusal))
        self.lose(worker, reason, now_s)

    def drop_silent(self, now_s: float) -> None:
        """Drop the workers that have not been heard for too long."""
        limit_s = self._limits.worker_silence_s
        for worker in tuple(self._workers):
            if worker.registration.ready and now_s >= worker.last_heard_s + limit_s:
                self.drop(worker, f"silent for {now_s - worker.last_heard_s:.1f} s", now_s)
        # A worker that loads is busy with that; its stream's end is enough to notice its own.
        heard_s = (worker.last_heard_s for worker in self._workers if worker.registration.ready)
        self.silence_due_s = min(heard_s, default=inf) + limit_s

    def note_ended(self, event: ProcessEnded, now_s: float) -> None:
        """Take the proof that a process has ended, and tell it to all workers, now and later."""
        self._census.note_ended(event.worker_id, event.incarnation)
        worker = self._workers.named(event.worker_id)
        if worker is not None and worker.registration.incarnation == event.incarnation:
            self.drop(worker, "its process is known to have ended", now_s, Refusal.INCARNATION)
        if event.from_outside:  # after the loss has been noted, which this may be the first word of
            self._recovery.explain((event.worker_id, event.incarnation), now_s)
        for survivor in self._workers:
            self._placements.emit(SendProcessGone(survivor.link, event.worker_id, event.incarnation))

    def note_change(self, now_s: float) -> None:
        """Note that workers came, went or began to drain; serve what waits for a pair if there is one.

        A prefill worker alone serves requests that their first token ends.
        """
        self._grace.note_change(now_s)
        if self.has_pair:
            self._recovery.retry_stranded(now_s)
            self.may_serve_more = True
        elif self._workers.routable(Role.PREFILL):
            self.may_serve_more = True
