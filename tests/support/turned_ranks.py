"""Ranks as threads over gloo, with the operations of a GPU, which Triton interprets: only one computes at a time.

Triton's interpreter changes its own modules while a kernel runs, so two threads must not be in one at once.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import torch
from torch._C import _distributed_c10d as c10d

from pdserve.base.ids import PageId
from pdserve.engine.device_pages import DevicePages
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.layouts import describe_layout
from pdserve.executor.rank_group import GroupRanks
from pdserve.executor.rank_memory import new_pages, rank_page_bytes
from pdserve.model import loading
from pdserve.model.config import ModelConfig
from pdserve.model.loading import load_rank
from pdserve.model.ops_cuda import CudaOps
from pdserve.model.weights import Rank, Weights
from pdserve.settings.degrees import Degrees

LIMIT_S = 60.0
PAGE_SIZE = 16
CPU = torch.device("cpu")


class TurnRanks(GroupRanks):
    """One rank, which lets another one compute while it waits for an operation."""

    def __init__(self, rank: Rank, turn: threading.Lock) -> None:
        super().__init__(rank, CPU)
        self._turn, self._computes = turn, False

    def join(self, descriptor: int, limit_s: float) -> None:
        super().join(descriptor, limit_s)
        self._computes = True

    def _wait(self, work: c10d.Work | None) -> None:
        if not self._computes:
            super()._wait(work)
            return
        self._turn.release()
        try:
            super()._wait(work)
        finally:
            self._turn.acquire()


class TurnedRanks:
    """A runner whose steps all ranks compute; each of them has pages of its own heads alone."""

    def __init__(self, threads: ThreadPoolExecutor, runners: list[CudaRunner], turn: threading.Lock) -> None:
        self.runners, self._threads, self._turn = runners, threads, turn
        self.kv, self.groups = runners[0].kv, runners[0].groups

    def run(self, plan: StepPlan) -> StepResult:
        def part(runner: CudaRunner) -> StepResult:
            with self._turn:
                return runner.run(plan)

        first, *_ = self._threads.map(part, self.runners)
        return first

    def page(self, page: PageId) -> torch.Tensor:
        """Return K and V of a page, of all heads."""
        return torch.cat([runner.kv[page] for runner in self.runners], 2)


@contextmanager
def turned_ranks(
    size: int, config: ModelConfig, weights: Weights, num_pages: int, limits: Limits
) -> Iterator[TurnedRanks]:
    layout, turn = describe_layout(config, "", PAGE_SIZE, "float32", "interpreter"), threading.Lock()
    store = new_pages(0)

    def load(index: int) -> CudaRunner:
        ranks = TurnRanks(Rank.at(index, Degrees(size)), turn)
        with turn:
            model = load_rank(config, weights, torch.float32, ranks)
        memory = torch.zeros(num_pages * rank_page_bytes(layout, ranks.rank), dtype=torch.uint8)
        ranks.join(store, LIMIT_S)
        return CudaRunner(model, num_pages, PAGE_SIZE, limits, None, DevicePages(memory, ranks.spread))

    try:
        with mock.patch.object(loading, "ops_for", return_value=CudaOps()), ThreadPoolExecutor(size) as threads:
            yield TurnedRanks(threads, list(threads.map(load, range(size))), turn)
    finally:
        os.close(store)
