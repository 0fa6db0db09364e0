"""How full a worker is, and which router sent what of it. Pure."""

from collections.abc import Iterable

from pdserve.engine.sequence import Job
from pdserve.load import LoadPart
from pdserve.perfmodel.curve import attention_work
from pdserve.worker.messages import Parts, RouterRef


class Taken:
    """Counts what routers have sent since this process started."""

    def __init__(self) -> None:
        self._num_placements = 0
        self._total = [0, 0, 0]  # continuations, tokens and work of prompts
        self._by_router: dict[RouterRef, list[int]] = {}

    def add(self, router: RouterRef, job: Job, *, computes: bool) -> int:
        """Count a placement and return its number. `computes`: its prompt is computed here."""
        num_tokens = len(job.token_ids) if computes else 0
        work = attention_work(num_tokens, 0)
        for sums in (self._total, self._by_router.setdefault(router, [0, 0, 0])):
            sums[0] += len(job.indices)
            sums[1] += num_tokens
            sums[2] += work
        self._num_placements += 1
        return self._num_placements

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
