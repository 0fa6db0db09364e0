"""Ranks as threads of this process: each has its part of a model, and all share the pages."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pdserve.engine.runner import Runner, zeroed
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.gloo_ranks import GlooRanks
from pdserve.executor.loading import describe_layout
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.loading import load_rank
from pdserve.model.weights import Rank, Weights

SWITCH_S = 1e-4  # threads that wait for each other would each wait for Python's lock


class Apart:
    """The others of a rank that are asked for nothing: it computes its own part."""

    rank = Rank(0, 2)

    def all_reduce(self, x: Tensor) -> None: ...

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x]


class ThreadRanks:
    """A runner whose steps all ranks compute."""

    def __init__(self, threads: ThreadPoolExecutor, models: list[Model], runners: list[Runner]) -> None:
        self.models, self.runners = models, runners
        self.kv, self.groups = runners[0].kv, runners[0].groups
        self._threads = threads

    def run(self, plan: StepPlan) -> StepResult:
        follow = [self._threads.submit(runner.follow, plan) for runner in self.runners[1:]]
        result = self.runners[0].run(plan)
        for each in follow:
            each.result()
        return result


@contextmanager
def thread_ranks(
    size: int, config: ModelConfig, weights: Weights, dtype: torch.dtype, num_pages: int, page_size: int = 16
) -> Iterator[ThreadRanks]:
    store = c10d.HashStore()
    name = str(dtype).removeprefix("torch.")
    page_bytes = describe_layout(config, "", page_size, name, "cpu").page_bytes
    memory = zeroed((num_pages * page_bytes,), torch.uint8, torch.device("cpu"))

    def load(index: int) -> Model:
        ranks = GlooRanks(Rank(index, size))
        ranks.meet(store)
        return load_rank(config, weights, dtype, ranks)

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with ThreadPoolExecutor(size) as threads:
            models = list(threads.map(load, range(size)))
            runners = [Runner(model, num_pages, page_size, memory=memory) for model in models]
            yield ThreadRanks(threads, models, runners)
    finally:
        sys.setswitchinterval(before)
