"""Whether a worker may be given a role. Pure."""

from pdserve.roles import Role, lacks_pages
from pdserve.router.view import WorkerView
from pdserve.router.workers import Workers

_WORK = {Role.PREFILL: "computes prompts", Role.DECODE: "decodes"}


def refusal(workers: Workers, worker: WorkerView, role: Role, *, force: bool) -> str:
    """Return why a worker cannot take a role, or nothing. With `force` others need not do what it no longer does."""
    if why := workers.refusal(worker):
        return why
    known = worker.registration
    longest = -(-known.max_model_len // known.layout.page_size)
    if why := lacks_pages(role, known.num_pages, longest):
        return f"{worker.name}: {why}: lower max_model_len, or raise num_pages"
    for pool, work in _WORK.items():
        leaves = worker.role.is_in(pool) and not role.is_in(pool)
        staying = [other for other in workers.routable(pool) if other is worker or other.coming_role.is_in(pool)]
        if leaves and not force and staying == [worker]:
            return f"{worker.name} is the only worker that {work}: make it mixed, or force this"
    return ""
