"""How full a worker is, and which router sent what of it. Pure."""

from collections.abc import Iterable

from pdserve.decode_worker.incoming import Incoming
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Job
from pdserve.load import LoadPart
from pdserve.perfmodel.curve import attention_work
from pdserve.prefill_worker.outgoing import Outgoing
from pdserve.prefill_worker.starting import Starting
from pdserve.worker.admission import Draining, Roles
from pdserve.worker.messages import Load, Parts, RouterRef
from pdserve.worker.tasks import Task


class Taken:
    """Counts what routers have sent since this process started."""

    def __init__(self) -> None:
        self._total = [0, 0, 0]  # continuations, tokens and work of prompts
        self._by_router: dict[RouterRef, list[int]] = {}

    def add(self, router: RouterRef, job: Job, *, computes: bool) -> None:
        """Count a placement. `computes`: its prompt is computed here."""
        num_tokens = len(job.token_ids) if computes else 0
        work = attention_work(num_tokens, 0)
        for sums in (self._total, self._by_router.setdefault(router, [0, 0, 0])):
            sums[0] += len(job.indices)
            sums[1] += num_tokens
            sums[2] += work

    def forget(self, router: RouterRef) -> None:
        """Keep what a router that is gone has sent in the total alone, which never falls."""
        self._by_router.pop(router, None)

    def parts(self, present: Iterable[tuple[RouterRef, LoadPart]]) -> Parts:
        """Return what is present and what was taken in, by router."""
        total, sums = [0] * 5, {router: [0] * 5 for router in self._by_router}
        for router, part in present:
            for known in (total, sums.setdefault(router, [0] * 5)):
                known[0] += part.num_running
                known[1] += part.num_coming
                known[2] += part.placed_tokens
                known[3] += part.waiting_tokens
                known[4] += part.waiting_work
        parts = {router: LoadPart(*known, *self._by_router.get(router, (0, 0, 0))) for router, known in sums.items()}
        return Parts(LoadPart(*total, *self._total), parts)


class Meter:
    def __init__(self, scheduler: Scheduler, starting: Starting, outgoing: Outgoing, incoming: Incoming) -> None:
        self.taken = Taken()
        self._scheduler = scheduler
        self._starting = starting
        self._outgoing = outgoing
        self._incoming = incoming

    def read(self, tasks: Iterable[Task], draining: Draining, roles: Roles, num_leaked: int) -> Load:
        scheduler, cache, num_stuck = self._scheduler, self._scheduler.cache, self._outgoing.num_stuck_pages
        pool = cache.pool
        return Load(
            pages_free=pool.num_free,
            pages_held=pool.num_held - num_stuck,
            pages_granted=pool.num_granted,
            pages_quarantined=pool.num_quarantined + num_stuck,
            pages_cached=cache.num_cached,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._starting.num_waiting + self._incoming.num_ungranted,
            waiting_tokens=scheduler.waiting_tokens + self._starting.waiting_tokens,
            kv_tokens=scheduler.kv_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_handoffs=self._outgoing.num_open + self._incoming.num_open,
            num_digest_mismatches=self._incoming.num_digest_mismatches,
            draining=draining.is_on,
            role=roles.role,
            role_epoch=roles.epoch,
            pages_leaked=num_leaked,
            drain_reason=draining.reason,
            pages_wanted=scheduler.pages_wanted + self._incoming.pages_wanted,
            parts=self.taken.parts((task.router, task.load_part) for task in tasks),
        )
