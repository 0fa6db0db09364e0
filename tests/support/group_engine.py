"""A scheduler and a runner of hashes whose layers keep KV in several groups. Free pages are spoilt after each step."""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace

from scheduled import sequence_of

from faultsim.engine import FakeRunner, expected
from pdserve.base.ids import PageId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Sampled, Sequence
from pdserve.engine.step import StepPlan, StepResult
from pdserve.protocol.paging import PageShape
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SamplingParams

VOCAB, WINDOW, PAGE_SIZE = 101, 6, 4
SHAPES = (PageShape(PAGE_SIZE), PageShape(2, window=WINDOW))


class Engine:
    """Wrong KV shows as a wrong token. With `ahead`, a step is planned while the one before runs."""

    def __init__(
        self, num_pages: int = 40, *others: PageShape, step_tokens: int = 8, ahead: bool = False, num_seqs: int = 4
    ) -> None:
        self.others = others or SHAPES[1:]
        self.runner = FakeRunner(num_pages, PAGE_SIZE, VOCAB, others=self.others)
        self.cache = KvCache(num_pages, self.runner.paging, PrefixHasher(b"secret", "model", PAGE_SIZE))
        self.scheduler = Scheduler(self.cache, Limits(num_seqs, step_tokens, 1000, frozenset()))
        self.tokens: dict[Sequence, list[int]] = {}
        self.most_held = 0
        self._under_way: deque[StepPlan] = deque()
        self._ahead = ahead
        self._last: StepResult | None = None

    def add(self, prompt: Seq[int], max_tokens: int, *, priority: int = 0) -> Sequence:
        number = len(self.tokens) + 1
        params = SamplingParams(seed=number, max_tokens=max_tokens)
        sequence = sequence_of(number, prompt, params, priority=priority)
        self.tokens[sequence] = []
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[int]:
        """Compute a step; return the tokens sampled."""
        while len(self._under_way) < 1 + self._ahead and (plan := self.scheduler.plan()) is not None:
            self._under_way.append(plan)
        self.most_held = max(self.most_held, self.cache.pool.num_held)
        if not self._under_way:
            return []
        plan = self._under_way.popleft()
        chunks = [c if c.previous is None else c.after(self._sampled(c.previous)) for c in plan.chunks]
        self._last = self.runner.run(replace(plan, chunks=tuple(chunks)))
        found = [one for one in self.scheduler.commit(plan, self._last) if isinstance(one, Sampled)]
        for one in found:
            self.tokens[one.sequence] += [token.token_id for token in one.tokens]
        self.cache.check()
        self._spoil()
        return [token.token_id for one in found for token in one.tokens]

    def finish(self) -> None:
        """Compute until every sequence has its tokens, all of them right; nothing is held then."""
        while self.scheduler.running or self.scheduler.waiting or self._under_way:
            assert self._under_way or self.scheduler.running or self.cache.pool.num_free, "nothing can go on"
            before = self.num_computed, len(self._under_way)
            self.step()
            assert before != (self.num_computed, len(self._under_way)), "nothing goes on"
        for sequence, tokens in self.tokens.items():
            assert tokens == self.expected(sequence)
        assert self.cache.pool.num_free == self.cache.pool.num_pages

    @property
    def num_computed(self) -> tuple[tuple[int, int], ...]:
        return tuple((each.computed, len(tokens)) for each, tokens in self.tokens.items())

    def expected(self, sequence: Sequence) -> list[int]:
        params = sequence.job.params
        return expected(sequence.job.token_ids, params.seed, params.max_tokens, VOCAB, self.others)

    def answer(self, prompt: Seq[int], max_tokens: int) -> list[int]:
        sequence = self.add(prompt, max_tokens)
        self.finish()
        return self.tokens[sequence]

    def _sampled(self, place: int) -> int:
        assert self._last is not None
        return self._last.tokens[place][0][0].token_id

    def _spoil(self) -> None:
        cached = {page for _, _, pages in self.cache.indexed for page in pages}
        for page in map(PageId, range(self.cache.pool.num_pages)):
            if self.cache.pool.is_free(page) and page not in cached:
                self.runner.page(page)[:] = b"\xff" * self.runner.page_bytes
