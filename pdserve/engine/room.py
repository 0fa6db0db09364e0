"""How many pages may wait for other workers, so that the longest prompt always finds room. Pure.

These pages wait for other workers: those of prompts that have been granted none at their targets, those granted to
hand-offs that arrive, cached ones held for such hand-offs, and quarantined ones. Invariant: on a worker that may have
prompts to hand off, they leave enough pages for the longest prompt.

So a prompt that has been granted pages at its target can always start, whatever arrives here, and its own pages are
free once it has left. A mixed worker leaves room for two: prompts that wait for grants also leave pages to grant the
longest one. Otherwise two mixed workers whose prompts wait for each other's grants would wait for ever.
"""

from pdserve.engine.kvcache import KvCache
from pdserve.ids import Attempt, RequestId


class Room:
    """Counts pages of one pool."""

    def __init__(self, cache: KvCache, max_model_len: int) -> None:
        self._pool = cache.pool
        self.longest = cache.num_pages(max_model_len)
        self.is_kept_by_role = True
        self.ahead: dict[tuple[RequestId, Attempt], int] = {}  # of prompts to hand off; 0: not started, or granted
        self.num_pinned = 0  # cached ones, held for hand-offs that arrive

    @property
    def num_granted(self) -> int:
        """Return how many pages hand-offs that arrive keep from others."""
        return self._pool.num_granted + self.num_pinned

    @property
    def left(self) -> int:
        """Return how many pages more may wait for other workers; below 0: there is no room for the longest prompt."""
        num_waiting = sum(self.ahead.values()) + self.num_granted + self._pool.num_quarantined
        return self._pool.num_pages - self.longest - num_waiting

    @property
    def for_grants(self) -> int:
        """Return how many pages may be granted, as far as they are free."""
        return self.left if self.is_kept_by_role or self.ahead else self._pool.num_pages
