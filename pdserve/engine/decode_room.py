"""Pages that decoding sequences write into. Pure.

Invariant: a sequence writes only to pages that nobody else holds. A page that is shared is copied first.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter

from pdserve.engine.kvcache import KvCache
from pdserve.engine.running_step import RunningStep
from pdserve.engine.sequence import Sequence

_urgency = attrgetter("urgency")


class DecodeRoom:
    """Gives pages to decoding sequences; for a sequence's next token by preempting others if need be."""

    def __init__(self, cache: KvCache, running: list[Sequence], preempt: Callable[[Sequence], None]) -> None:
        """`running`: the scheduler's own list; `preempt` takes a sequence out of it and releases its pages."""
        self._cache = cache
        self._running = running
        self._preempt = preempt

    def lacks(self, step: RunningStep, decoding: list[Sequence]) -> bool:
        """Return whether the next token of some sequence would get a page only by preempting others."""
        pool, sizes, num_wanted = self._cache.pool, self._cache.paging.sizes, 0
        if len(decoding) * len(sizes) <= pool.num_free:
            return False
        for sequence in decoding:
            position = self._next_token(step, sequence)
            for group, size in enumerate(sizes):
                page = sequence.pages.find(group, position // size)
                num_wanted += page is None or pool.holders(page) > 1
        return num_wanted > pool.num_free

    def make(self, step: RunningStep, sequence: Sequence, num_rows: int, num_after: int) -> int:
        """Return for how many of its next tokens a sequence has room after this; 0 if it was preempted itself.

        The first of them is worth preempting others for. The rest get pages that the next tokens of `num_after` other
        sequences cannot need.
        """
        first, holders, tables = self._next_token(step, sequence), self._cache.pool.holders, sequence.pages
        for group, size in enumerate(self._cache.paging.sizes):
            page = tables.find(group, first // size)
            if (page is None or holders(page) > 1) and not self._make_for_one(step, sequence, group, first // size):
                return 0
        if num_rows == 1:  # by far the most frequent
            return 1
        num_kept = num_after * len(self._cache.paging.sizes)
        for group in range(len(self._cache.paging.sizes)):
            num_rows = self._make_for_more(sequence, group, first, num_rows, num_kept)
        return num_rows

    def _make_for_more(self, sequence: Sequence, group: int, first: int, num_rows: int, num_kept: int) -> int:
        """Return for how many tokens from `first` on a sequence has room in a group, leaving so many pages free."""
        size, pool = self._cache.paging.sizes[group], self._cache.pool
        for number in range(first // size + 1, -(-(first + num_rows) // size)):
            page = sequence.pages.find(group, number)
            if page is not None:
                if pool.holders(page) > 1:
                    return number * size - first
            elif pool.num_free <= num_kept or (fresh := self._cache.take(1)) is None:
                return number * size - first
            else:
                sequence.pages.runs[group].extend(fresh)
        return num_rows

    def _next_token(self, step: RunningStep, sequence: Sequence) -> int:
        return sequence.computed + step.progress_before(sequence).num_tokens

    def _make_for_one(self, step: RunningStep, sequence: Sequence, group: int, number: int) -> bool:
        """Give a sequence a page of that number of its own, preempting others; False if it was preempted."""
        pool, shared = self._cache.pool, sequence.pages.find(group, number)
        while (pages := self._cache.take(1)) is None:
            self._preempt(victim := max(self._preemptible(step), key=_urgency))
            if victim is sequence:
                return False
            if shared is not None and pool.holders(shared) == 1:
                return True  # the other holder was the victim
        run = sequence.pages.runs[group]
        if shared is None:
            run.append(pages[0])
            return True
        step.copies.append((shared, pages[0]))
        pool.release((shared,))
        run[number - sequence.pages.firsts[group]] = pages[0]
        return True

    def _preemptible(self, step: RunningStep) -> Iterable[Sequence]:
        return (s for s in self._running if s.pages and not s.is_held and s not in step.sequences)
