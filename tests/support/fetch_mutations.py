"""Bugs on purpose in how leading pages of a prompt are fetched."""

from collections.abc import Iterator

from breaking import Original, mutation, wrap

from pdserve.kvtransfer.doors import Arriving, Result
from pdserve.worker.fetches import Fetches


@mutation
def release_fetched_pages_before_the_prompt_has_started() -> Iterator[object]:
    """Leave them to whoever wants free pages."""

    def conclude(original: Original, self: Fetches, outcome: Arriving, now_s: float) -> list[Result]:
        results: list[Result] = original(self, outcome, now_s)
        fetch = self._fetches.get(outcome.key)
        if fetch is not None:
            self._scheduler.cache.pool.release(fetch.pages)
            fetch.pages = ()
        return results

    with wrap(Fetches, "conclude_fetch", conclude) as patched:
        yield patched
