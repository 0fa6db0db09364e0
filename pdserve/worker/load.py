"""How full a worker is, as far as its scheduler knows. Pure."""

from pdserve.engine.scheduler import Scheduler
from pdserve.worker.audit import Auditor
from pdserve.worker.words import Load


def load_of(scheduler: Scheduler, auditor: Auditor) -> Load:
    """Return the load of a worker that has no hand-offs and is not draining."""
    pool = scheduler.cache.pool
    return Load(
        pages_free=pool.num_free,
        pages_held=pool.num_held,
        pages_granted=pool.num_granted,
        pages_quarantined=pool.num_quarantined,
        pages_cached=scheduler.cache.num_cached,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        waiting_tokens=scheduler.waiting_tokens,
        kv_tokens=scheduler.kv_tokens,
        num_preemptions=scheduler.num_preemptions,
        num_handoffs=0,
        num_digest_mismatches=0,
        draining=False,
        pages_leaked=auditor.num_leaked,
    )
