"""A runner with few pages and a scheduler. Whatever nobody needs any more is overwritten after each step."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from scheduled import Scheduled, sequence_of

from pdserve.base.ids import PageId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.layer_kinds import paging_of
from pdserve.engine.runner import EngineRunner, LaunchingRunner
from pdserve.engine.scheduler import Limits
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan, StepResult
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SamplingParams

CHUNK = 40
LIMITS = Limits(4, CHUNK, 1000, frozenset())


class Engine(Scheduled):
    """With a runner that launches steps, one is planned and launched before the one before has ended."""

    def __init__(self, runner: EngineRunner) -> None:
        self.runner, self.num_pages = runner, len(runner.kv)
        cache = KvCache(self.num_pages, paging_of(runner.groups), PrefixHasher(b"secret", "model"))
        super().__init__(cache, LIMITS, runner.run, depth=2 if isinstance(runner, LaunchingRunner) else 1)
        self.held: list[int] = []  # pages, while each step ran

    @property
    def tokens(self) -> dict[int, list[int]]:
        return {number: tokens for (number, _), tokens in self.answers.items()}

    def generate(self, prompts: Seq[list[int]], num_tokens: int) -> list[Sequence]:
        params, first = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True), len(self.answers)
        sequences = [sequence_of(number, each, params) for number, each in enumerate(prompts, first)]
        for sequence in sequences:
            self.scheduler.add(sequence)
        self.run()
        return sequences

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.held.append(self.scheduler.cache.pool.num_held)
        if not isinstance(self.runner, LaunchingRunner):
            return super().begin(plan)
        self.runner.start(plan)
        return self.runner.finish

    def end_oldest(self) -> None:
        super().end_oldest()
        self._spoil()

    def _spoil(self) -> None:
        cached = {page for _, _, pages in self.scheduler.cache.indexed for page in pages}
        unneeded = [page for page in range(self.num_pages) if self.scheduler.cache.pool.is_free(PageId(page))]
        self.runner.kv[[page for page in unneeded if page not in cached]] = torch.nan
