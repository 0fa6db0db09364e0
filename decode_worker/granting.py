"""Sets pages aside for hand-offs, mints the grants that offer them, and makes sequences of what came. Does no I/O.

Invariant: what a grant names is reserved for it alone, and each running sequence keeps a page to grow into.
"""

from pdserve.decode_worker.rules import Rules
from pdserve.decode_worker.tasks import Inbound, Task
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer import receiver
from pdserve.kvtransfer.session import KV_REGION, Capsule, Grant, mint_capability


class Granting:
    """One process's grants: their capabilities are under a key that never leaves it."""

    def __init__(self, scheduler: Scheduler, key: bytes, rules: Rules) -> None:
        self._scheduler = scheduler
        self._key = key
        self._rules = rules

    def reserve(self, task: Task, num_coming: int) -> Inbound | None:
        """Set pages aside for a hand-off, beside what runs and `num_coming` sequences; or None, and change nothing."""
        cache, scheduler = self._scheduler.cache, self._scheduler
        width = len(task.job.indices)
        busy = scheduler.num_running + num_coming
        if (busy and busy + width > scheduler.limits.max_num_seqs) or task.peer is None:
            return None
        num_grown_into = busy + width if busy else 0
        if cache.pool.num_free <= num_grown_into:
            return None
        num_tokens = len(task.job.token_ids)
        reused = cache.reuse(task.prefix, (num_tokens - 1) // cache.page_size)
        count = cache.num_pages(num_tokens) - len(reused)
        room = cache.pool.num_free - num_grown_into
        pages = cache.grant(count) if count <= room else None
        if pages is None:
            cache.pool.release(reused)
            return None
        generations = cache.pool.generations(pages)
        capability = mint_capability(self._key, task.key, KV_REGION, pages, generations)
        grant = Grant(len(reused), pages, generations, capability, self._rules.lease_s)
        checked = self._rules.digests.checks(task.key)
        half = receiver.Receiver(grant, checks_digests=checked)
        return Inbound(task.key, task.peer, half, reused, width)


def committed(scheduler: Scheduler, task: Task, inbound: Inbound, capsule: Capsule) -> list[Sequence]:
    """Return the sequences that a committed hand-off has become: they share the prompt's pages."""
    pages = [*inbound.reused, *inbound.receiver.grant.pages]
    prompt = Sequence(
        job=task.job,
        indices=capsule.indices,
        tokens=list(task.job.token_ids),
        order=task.order,
        computed=capsule.num_tokens,
        pages=pages,
        num_published=len(inbound.reused),
    )
    prompt.prefix.hashes += task.prefix.hashes
    scheduler.publish(prompt)
    return scheduler.split(prompt, zip(capsule.indices, capsule.first_tokens, strict=True))
