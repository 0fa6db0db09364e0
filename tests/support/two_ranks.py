"""An executor of two ranks, each a thread of this process: what a worker of several devices is to the rest of a worker.

Each rank computes the whole model, on pages of its own. Its region has half of the KV heads of every page. Before a
step, a rank reads the pages of the step from the regions of both. So a token is right only if both regions are, and
both ranks have done all steps in one order.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from pdserve.base.errors import DeviceError, InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.runner import Runner
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.failing import Isolating
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.routes import Share

NUM_RANKS = 2
MAX_STARTED = 2
FORGOTTEN = 7.0  # what lies on a rank's own pages after a step
LONGEST_S = 60.0  # for a rank that waits for the other one: then the test fails


class Rank:
    """One rank: a model, pages that it computes on, and its part of every page."""

    def __init__(self, number: int, runner: Runner) -> None:
        num_heads = runner.kv.shape[3]
        self.number = number
        self.runner = runner
        self.steps = Isolating(runner.run)
        self.heads = slice(number * num_heads // NUM_RANKS, (number + 1) * num_heads // NUM_RANKS)
        memory = runner.kv[:, :, :, self.heads].permute(0, 3, 1, 2, 4, 5).contiguous()
        self.part = memory.permute(0, 2, 3, 1, 4, 5)
        layers = (0, runner.kv.shape[1])
        share, whole = Share(layers, (self.heads.start, self.heads.stop)), Share(layers, (0, num_heads))
        self.region = Region.of_rank(memory.view(torch.uint8).view(len(memory), -1).numpy(), share, whole)
        self.thread = ThreadPoolExecutor(1, f"rank-{number}")
        self.answers: list[Future[StepResult]] = []
        self.has_ended = False


class TwoRanks:
    """Starts each step on both ranks; it is over when it is on both, and both have the same result."""

    device_name = "two ranks"

    def __init__(self, new_runner: Callable[[], Runner], page_size: int) -> None:
        self.ranks = tuple(Rank(number, new_runner()) for number in range(NUM_RANKS))
        self.regions = tuple(rank.region for rank in self.ranks)
        self.region, self.mover_sockets = self.regions[0], ()  # no process is driven
        self._page_size = page_size
        self._meet = threading.Barrier(NUM_RANKS, timeout=LONGEST_S)
        self._ends = ThreadPoolExecutor(1, "step-ends")
        self._started: list[Future[StepResult]] = []

    def start(self, plan: StepPlan) -> Future[StepResult]:
        self._started = [step for step in self._started if not step.done()]
        if len(self._started) >= MAX_STARTED:
            raise InvariantError(f"started a step while {len(self._started)} are under way")
        answers = [self._submit(rank, plan) for rank in self.ranks]
        step = self._ends.submit(_joined, answers)
        self._started.append(step)
        return step

    def end(self, number: int) -> None:
        """Note that a rank's process has ended, in whatever it did."""
        rank = self.ranks[number]
        rank.has_ended = True
        self._meet.abort()
        for answer in rank.answers:
            with suppress(InvalidStateError):
                answer.set_exception(ProcessLookupError("its process has ended"))

    def take_memory(self) -> None:
        """Do nothing: the memory of tests is small."""

    def close(self) -> None:
        for rank in self.ranks:
            rank.thread.shutdown(wait=not rank.has_ended)
        self._ends.shutdown()

    def _submit(self, rank: Rank, plan: StepPlan) -> Future[StepResult]:
        answer: Future[StepResult] = Future()
        rank.answers = [*(each for each in rank.answers if not each.done()), answer]
        if rank.has_ended:
            answer.set_exception(ProcessLookupError("its process has ended"))
        rank.thread.submit(self._compute, rank, plan).add_done_callback(partial(self._answer, answer))
        return answer

    def _answer(self, answer: Future[StepResult], computed: Future[StepResult]) -> None:
        """Pass on what a rank has computed, unless its process has ended by then."""
        error = computed.exception()
        with suppress(InvalidStateError):
            if error is None:
                answer.set_result(computed.result())
            else:
                self._meet.abort()  # or the other rank would wait for ever
                answer.set_exception(error)

    def _compute(self, rank: Rank, plan: StepPlan) -> StepResult:
        read, written = pages_of(plan, self._page_size)
        self._meet.wait()  # for the end of the step before, on both ranks
        for other in self.ranks:
            rank.runner.kv[read, :, :, other.heads] = other.part[read]
        self._meet.wait()  # until both have read
        result = rank.steps.run(plan)
        rank.part[written] = rank.runner.kv[written][:, :, :, rank.heads]
        rank.runner.kv[written] = FORGOTTEN
        return result


def pages_of(plan: StepPlan, page_size: int) -> tuple[list[PageId], list[PageId]]:
    """Return the pages that a step reads, and those that it writes."""
    sources, targets = ({pair[end] for pair in plan.copies} for end in (0, 1))
    read = {page for chunk in plan.chunks for page in chunk.pages}
    written = {page for chunk in plan.chunks for page in chunk.pages[chunk.start // page_size :]}
    return sorted((read - targets) | sources), sorted(written | targets)


def _joined(answers: list[Future[StepResult]]) -> StepResult:
    """Wait for all ranks, and return what all of them have found."""
    errors = [answer.exception() for answer in answers]
    for error in errors:
        if isinstance(error, InvariantError):
            raise error
    failed = [(number, error) for number, error in enumerate(errors) if error is not None]
    if failed:
        waited = [threading.BrokenBarrierError]
        number, error = min(failed, key=lambda each: type(each[1]) in waited)  # that of a rank which waited tells less
        raise DeviceError(f"rank {number}: {type(error).__name__}: {error}") from error
    first, *others = [answer.result() for answer in answers]
    for number, other in enumerate(others, start=1):
        for field in ("tokens", "failed", "prompts", "stuck", "drafts"):
            if getattr(first, field) != getattr(other, field):
                raise InvariantError(f"ranks 0 and {number} differ in {field} of a step")
    return replace(first, elapsed_s=max(each.elapsed_s for each in (first, *others)))
