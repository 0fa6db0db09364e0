"""How full a worker is, which router sent what of it, and whether pages are held by what is going on. Pure."""

from collections import Counter
from collections.abc import Iterable

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.decode_worker.incoming import Incoming
from pdserve.engine.pages import PagePool
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Job
from pdserve.kvtransfer.doors import Claim
from pdserve.perfmodel.curve import attention_work
from pdserve.prefill_worker.outgoing import Outgoing
from pdserve.prefill_worker.starting import Starting
from pdserve.protocol.reports import LoadPart, sum_of
from pdserve.worker.admission import Draining, Roles
from pdserve.worker.messages import Load, Parts, RouterRef
from pdserve.worker.tasks import Task

AUDIT_EVERY_S = 10.0  # between two looks for leaked pages


def leaked_pages(pool: PagePool, claims: Iterable[Claim]) -> tuple[PageId, ...]:
    """Return pages with fewer claims than references in the pool; InvariantError where one has more claims.

    Pages are looked at one by one only where their totals differ: a comparison of totals is cheap.
    """
    claims = tuple(claims)
    claimed_pages = (
        sum(len(claim.held) for claim in claims),
        sum(len(claim.granted) for claim in claims),
        sum(len(claim.quarantined) for claim in claims),
    )
    if claimed_pages == (pool.num_holds, pool.num_granted, pool.num_quarantined):
        return ()
    held = Counter(page for claim in claims for page in claim.held)
    granted = {page for claim in claims for page in claim.granted}
    quarantined = {page for claim in claims for page in claim.quarantined}
    leaked = []
    for page in map(PageId, range(pool.num_pages)):
        has = (pool.holders(page), int(pool.is_granted(page)), int(pool.is_quarantined(page)))
        claimed = (held[page], int(page in granted), int(page in quarantined))
        if any(more > fewer for more, fewer in zip(claimed, has, strict=True)):
            raise InvariantError(f"page {page}: held, granted, quarantined {has} times, and used {claimed} times")
        if claimed != has:
            leaked.append(page)
    return tuple(leaked)


class Auditor:
    """Looks for leaked pages every AUDIT_EVERY_S, and at each look while the worker is idle.

    Invariant: each page that is not free is claimed by a task or a hand-off. A page that is not claimed is leaked. A
    page with more claims than references could be given out while it is used, so the process stops.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._due_s = 0.0
        self.num_leaked = 0

    def look(self, claims: Iterable[Claim], now_s: float, *, idle: bool) -> None:
        """Count the leaked pages anew, if that is due."""
        if idle or now_s >= self._due_s:
            self._due_s = now_s + AUDIT_EVERY_S
            self.num_leaked = len(leaked_pages(self._pool, claims))


class Taken:
    """Counts what routers have sent since this process started."""

    def __init__(self) -> None:
        self._total = LoadPart()
        self._by_router: dict[RouterRef, LoadPart] = {}

    def add(self, router: RouterRef, job: Job, *, computes: bool) -> None:
        """Count a placement. `computes`: its prompt is computed here."""
        num_tokens = len(job.token_ids) if computes else 0
        work = attention_work(num_tokens, 0)
        part = LoadPart(num_taken=len(job.indices), taken_tokens=num_tokens, taken_work=work)
        self._total = self._total.plus(part)
        self._by_router[router] = self._by_router.get(router, LoadPart()).plus(part)

    def forget(self, router: RouterRef) -> None:
        """Drop the counts of a router that is gone. What it has sent stays in the total, which never falls."""
        self._by_router.pop(router, None)

    def parts(self, present: Iterable[tuple[RouterRef, LoadPart]]) -> Parts:
        """Return the present load, and what was taken in since the start, by router."""
        by_router = {router: [part] for router, part in self._by_router.items()}
        for router, part in present:
            by_router.setdefault(router, []).append(part)
        sums = {router: sum_of(parts) for router, parts in by_router.items()}
        known = sum_of(self._by_router.values())
        return Parts(sum_of(sums.values()).plus(self._total.minus(known)), sums)


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
            num_waiting=len(scheduler.waiting) + self._starting.num_waiting + self._incoming.num_ungranted,
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
