"""Bugs on purpose in how leading pages of a prompt are fetched."""

from breaking import Original, breaks

from pdserve.kvtransfer.doors import Arriving, Result
from pdserve.worker.fetches import Fetches


@breaks(Fetches, "conclude_fetch")
def release_fetched_pages_before_the_prompt_has_started(
    original: Original, self: Fetches, outcome: Arriving, now_s: float
) -> list[Result]:
    """Leave them to whoever wants free pages."""
    results: list[Result] = original(self, outcome, now_s)
    fetch = self._fetches.get(outcome.key)
    if fetch is not None:
        self._scheduler.cache.pool.release(fetch.pages)
        fetch.pages = ()
    return results
