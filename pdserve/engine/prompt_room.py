"""Pages that prompts are computed into. Pure.

Invariant: a prompt that has begun can be finished. Without windows it has all its pages from its first chunk on. With
windows it has pages for the window and for the chunks that may be under way at once. Each page that leaves the window
is replaced before anybody else gets the page that it frees.

A page that has left is not free while somebody else holds it, such as a sequence that shares a prefix. Then the prompt
waits. When no step can be planned because of that, the most urgent prompt takes the pages of less urgent sequences.
"""

from collections.abc import Callable
from operator import attrgetter

from pdserve.engine.kvcache import KvCache
from pdserve.engine.running_step import RunningStep
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Phase

_urgency = attrgetter("urgency")


class PromptRoom:
    """Gives pages to prompts that run, in place of those that have left a window."""

    def __init__(
        self, cache: KvCache, running: list[Sequence], preempt: Callable[[Sequence], None], step_tokens: int
    ) -> None:
        """`running`, `preempt`: as in `DecodeRoom`. `step_tokens`: that a step computes at most."""
        self._cache = cache
        self._running = running
        self._preempt = preempt
        self._step_tokens = step_tokens
        self.stalled: Sequence | None = None  # runs, and lacks pages that no other sequence could give up

    def begin(self, sequence: Sequence) -> bool:
        """Give a sequence the pages that it needs at once, cached ones as far as they go; or return False."""
        size = self._cache.page_size
        # At least one token is computed, to sample from; and all where each one's hidden state is needed.
        usable = 0 if sequence.reads_all else (len(sequence.tokens) - 1) // size
        hit = self._cache.hold(sequence.prefix, usable, self._step_tokens)
        if hit is None:
            return False
        sequence.pages, sequence.num_published = hit.pages, hit.num_spans
        sequence.computed = hit.num_spans * size
        if not sequence.has_run:
            sequence.num_cached_tokens = sequence.computed
        return True

    def refill(self) -> None:
        """Give prompts the pages that they lack, as far as there are free ones, the most urgent first."""
        self.stalled = None
        if not self._cache.paging.has_windows:
            return
        for sequence in sorted([s for s in self._running if s.phase is Phase.PROMPT and s.pages], key=_urgency):
            self._refill(sequence)

    def _refill(self, sequence: Sequence) -> None:
        cache, tables = self._cache, sequence.pages
        ends = cache.paging.ends(sequence.computed, len(sequence.tokens), self._step_tokens)
        for group, run in enumerate(tables.runs):
            missing = ends[group] - tables.firsts[group] - len(run)
            if missing > 0:
                run.extend(cache.take(min(missing, cache.pool.num_free)) or ())

    def of(self, step: RunningStep, sequence: Sequence) -> int:
        """Return how many of its next tokens a prompt has pages for; 0 where it was preempted."""
        tables = sequence.pages
        if not tables:
            return 0
        parts = zip(tables.firsts, tables.runs, self._cache.paging.sizes, strict=True)
        end = min([(first + len(run)) * size for first, run, size in parts])
        return end - sequence.computed - step.progress_before(sequence).num_tokens

    def clear(self, step: RunningStep, sequence: Sequence) -> int:
        """Preempt less urgent sequences until a prompt has pages for its next token; return for how many it has.

        0 where nothing helps: others than sequences hold the pages, or it has been preempted itself.
        """
        while sequence.pages and not self.of(step, sequence):
            victims = [s for s in self._running if s.pages and not s.is_held and s.urgency > sequence.urgency]
            if not victims:
                break
            self._preempt(max(victims, key=_urgency))
            self._refill(sequence)
        found = self.of(step, sequence)
        self.stalled = None if found else sequence
        return found
