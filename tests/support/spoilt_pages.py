"""A runner with few pages and a scheduler. Whatever nobody needs any more is overwritten after each step."""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from pdserve.base.ids import Attempt, PageId, RequestId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.layer_kinds import paging_of
from pdserve.engine.runner import EngineRunner, LaunchingRunner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sampled, Sequence
from pdserve.engine.step import StepPlan
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SamplingParams

CHUNK = 40
LIMITS = Limits(4, CHUNK, 1000, frozenset())


@dataclass
class Engine:
    """With a runner that launches steps, one is planned and launched before the one before it has ended."""

    runner: EngineRunner
    tokens: dict[int, list[int]] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)  # pages, while each step ran

    def __post_init__(self) -> None:
        self.num_pages = len(self.runner.kv)
        self.cache = KvCache(self.num_pages, paging_of(self.runner.groups), PrefixHasher(b"secret", "model"))
        self.scheduler = Scheduler(self.cache, LIMITS)

    def generate(self, prompts: Seq[list[int]], num_tokens: int) -> list[Sequence]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        sequences = []
        for token_ids in prompts:
            number = len(self.tokens)
            job = Job(RequestId(number.to_bytes(16)), Attempt(0), tuple(token_ids), len(token_ids), params, (0,))
            sequences.append(Sequence(job, (0,), list(token_ids), number))
            self.tokens[number] = []
            self.scheduler.add(sequences[-1])
        self._compute()
        self.cache.check()
        return sequences

    def _compute(self) -> None:
        runner, under_way = self.runner, deque[StepPlan]()
        depth = 2 if isinstance(runner, LaunchingRunner) else 1
        while True:
            while len(under_way) < depth and (plan := self.scheduler.plan()) is not None:
                self.held.append(self.cache.pool.num_held)
                under_way.append(plan)
                if isinstance(runner, LaunchingRunner):
                    runner.start(plan)
            if not under_way:
                return
            plan = under_way.popleft()
            result = runner.finish() if isinstance(runner, LaunchingRunner) else runner.run(plan)
            for outcome in self.scheduler.commit(plan, result):
                if isinstance(outcome, Sampled):
                    self.tokens[outcome.sequence.order] += [token.token_id for token in outcome.tokens]
            self._spoil()

    def _spoil(self) -> None:
        cached = {page for _, _, pages in self.cache.indexed for page in pages}
        unneeded = [page for page in range(self.num_pages) if self.cache.pool.is_free(PageId(page))]
        self.runner.kv[[page for page in unneeded if page not in cached]] = torch.nan
