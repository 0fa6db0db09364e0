"""Ranks as threads of this process: each has its part of a model. All share the pages, or each has its own."""

import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from pdserve.engine.batch import Ints
from pdserve.engine.runner import RankPages, Runner, zeroed
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.layouts import describe_layout
from pdserve.executor.rank_memory import own_layout, rank_page_bytes
from pdserve.executor.rank_sums import ranks_of, slots_bytes
from pdserve.kernels.cpu.calls import Calls
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.loading import load_model, load_rank
from pdserve.model.ops import times
from pdserve.model.weights import Rank, Weights
from pdserve.protocol.kvlayout import KvCode
from pdserve.settings.degrees import Degrees

LIMIT_S = 60.0
PAGE_SIZE = 16
SWITCH_S = 1e-4  # threads that wait for each other would each wait for Python's lock


class Apart:
    """The others of a rank that are asked for nothing: it computes its own part."""

    rank, device = Rank(0, 2), torch.device("cpu")

    def through(self, calls: Calls) -> Self:
        raise NotImplementedError

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, scale: float = 1.0) -> Tensor:
        total = times(x, scale)
        return total if residual is None else residual + total

    def gather(self, x: Tensor, width: int) -> Tensor:
        return x


class ThreadRanks:
    """A runner whose steps all ranks compute."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        models: list[Model],
        new_runner: Callable[[Model, RankPages], Runner],
        pages: Seq[RankPages],
    ) -> None:
        """pages: of each rank."""
        self.models = models
        kept = [replace(pages[0], keep=self._keep), *pages[1:]]
        self.runners = [new_runner(*each) for each in zip(models, kept, strict=True)]
        self.kv, self.groups = self.runners[0].kv, self.runners[0].groups
        self._threads = threads
        self._follow: list[Future[None]] = []

    def run(self, plan: StepPlan) -> StepResult:
        self._follow = [self._threads.submit(runner.follow, plan) for runner in self.runners[1:]]
        result = self.runners[0].run(plan)
        self._wait()
        return result

    def _wait(self) -> None:
        for each in self._follow:
            each.result()

    def _keep(self, num_kept: Ints | None) -> None:
        self._wait()
        for runner in self.runners[1:]:
            runner.commit(num_kept)


@contextmanager
def thread_ranks(
    degrees: Degrees,
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    num_pages: int,
    code: KvCode | None = None,
) -> Iterator[ThreadRanks]:
    """Where pages divide states, each rank has memory of its own for its heads of each page."""
    are_own = config.num_state_parts > 1
    layout = describe_layout(config, "", PAGE_SIZE, code or str(dtype).removeprefix("torch."), "cpu")
    ranks = [Rank.at(index, degrees) for index in range(degrees.num_ranks)]
    slots = torch.zeros(slots_bytes(degrees), dtype=torch.uint8)

    def load(rank: Rank) -> Model:
        if len(ranks) == 1:
            return load_model(config, weights, dtype)
        return load_rank(config, weights, dtype, ranks_of(rank, slots, [], LIMIT_S))

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with ThreadPoolExecutor(len(ranks)) as threads:
            models = list(threads.map(load, ranks))

            def new_runner(model: Model, pages: RankPages) -> Runner:
                return Runner(model, num_pages, PAGE_SIZE, pages=pages, code=code)

            if are_own:
                by_rank = [
                    _memory(num_pages, rank_page_bytes(own_layout(config, layout, degrees), each)) for each in ranks
                ]
            else:
                by_rank = [_memory(num_pages, layout.page_bytes)] * len(ranks)
            yield ThreadRanks(threads, models, new_runner, [RankPages(each, are_own) for each in by_rank])
    finally:
        sys.setswitchinterval(before)


def _memory(num_pages: int, page_bytes: int) -> Tensor:
    return zeroed((num_pages * page_bytes,), torch.uint8, torch.device("cpu"))
