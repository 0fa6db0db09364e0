"""A worker of several ranks: this process is rank 0, and each other rank is a child of it.

Ranks that divide the heads of a model compute each step side by side. Pipeline stages compute it one after the other:
rank 0 is the last one, which samples, rank 1 the first one, and so on.

Invariant: a step is over when it is over on all ranks; until then nobody reads the pages that it writes. A rank that
fails or ends is a broken device: this process ends, and the kernel ends its children with it.

By default all ranks share one memory for pages, in which each writes its own heads, or its own layers. So rank 0 alone
has a mover, and its pages are those of a worker with one rank. Where each rank has memory of its own, with its heads or
layers alone, it has a mover of its own, which rank 0 drives over a second socket, and pages are copied on all ranks.
"""

import logging
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from pdserve.base.errors import DeviceError, InvariantError
from pdserve.engine.drafting import Drafter
from pdserve.engine.head_drafting import Drawn
from pdserve.engine.runner import EngineRunner, LaunchingRunner
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.followers import Followers
from pdserve.executor.local import LocalExecutor
from pdserve.executor.rank_group import within
from pdserve.executor.steps_ahead import StepsAhead
from pdserve.kvtransfer.region import Region

if TYPE_CHECKING:
    from pdserve.engine.head_cuda import CudaHead

logger = logging.getLogger(__name__)

_Made = TypeVar("_Made")

STUCK_S = 2.0  # for a rank whose part takes no longer than that which has failed


class RankedExecutor:
    """Computes each step on all ranks; see `Executor`."""

    def __init__(
        self,
        runner: EngineRunner,
        followers: Followers,
        thread: ThreadPoolExecutor,
        device_name: str,
        step_s: float = 0.0,
        drafter: Drafter | None = None,
    ) -> None:
        """Lead the followers, who have met. thread: the one that has started them; `close` ends both.

        drafter: guesses on this rank alone, while the others wait for the next step, or leads them (`LeadingHead`).
        """
        self._thread, self._followers = thread, followers
        self._ahead = StepsAhead(followers.begin) if followers.ranks.rank.num_stages > 1 else None
        begin = followers.begin if self._ahead is None else self._ahead.begin
        leading = Leading(runner, followers, begin)
        if isinstance(runner, LaunchingRunner):
            leading = LeadingLaunches(runner, followers)
        self._local = LocalExecutor(leading, thread, device_name, step_s, drafter, followers.region)

    @property
    def device_name(self) -> str:
        return self._local.device_name

    @property
    def region(self) -> Region:
        return self._local.region

    @property
    def mover_sockets(self) -> tuple[socket.socket, ...]:
        return self._followers.mover_sockets

    def start(self, plan: StepPlan) -> Future[StepResult]:
        if (ahead := self._ahead) is None:
            return self._local.start(plan)
        ahead.start(plan)
        step = self._local.start(plan)
        step.add_done_callback(lambda _: ahead.end())  # in the engine's thread, before the next step
        return step

    def take_memory(self) -> None:
        self._local.take_memory()

    def close(self) -> None:
        with within(self._followers.drain_s, "launched steps"):
            self._local.drain()  # while the other ranks still do their parts
        self._thread.submit(self._followers.close).result()
        self._local.close()
        if self._ahead is not None:
            self._ahead.close()


class Leading:
    """Rank 0's runner, and all that others do of its steps."""

    def __init__(self, runner: EngineRunner, followers: Followers, begin: Callable[[StepPlan], None]) -> None:
        """begin: lets others begin a step."""
        self.kv = runner.kv
        self._runner = runner
        self._followers, self._begin = followers, begin

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step.

        What fails here after the last sum, as in sampling, is an error of the step: all other ranks end their parts.
        Otherwise they wait in a sum, for `stalled_step_s`: DeviceError.
        """
        if not plan.chunks:
            return self._followers.copy(plan, self._runner.run)
        if plan.copies:
            raise InvariantError("pages are copied while ranks compute")
        self._followers.are_waiting = False  # also where they have begun before
        self._begin(plan)
        return self._ended(lambda: self._runner.run(plan))

    def guess(self, plan: StepPlan, compute: Callable[[], _Made]) -> _Made:
        """Let all ranks compute a pass in which a head guesses; `compute` does on this one. It fails as `run` does."""
        self._followers.are_waiting = False
        self._followers.begin(plan, is_guessing=True)
        return self._ended(compute)

    def _ended(self, compute: Callable[[], _Made]) -> _Made:
        """Compute what the others have begun; return once all have ended it."""
        try:
            result = compute()
            self._followers.ranks.check()
        except InvariantError:
            raise
        except Exception as error:
            try:
                self._end_others()
            except DeviceError as stuck:
                raise DeviceError(f"{type(error).__name__}: {error}; then: {stuck}") from error
            raise
        self._followers.end()
        return result

    def _end_others(self) -> None:
        """Let the others end a step that has failed here; DeviceError where they wait in a sum."""
        if (device := self.kv.device).type == "cuda":  # which still computes, as theirs do
            try:
                torch.cuda.current_stream(device).synchronize()
            except RuntimeError as error:
                raise DeviceError(str(error)) from error
        self._followers.end(STUCK_S)


class LeadingHead:
    """Rank 0's part of a head that all ranks with a device compute together; see `HeadPasses`."""

    follows_steps = True

    def __init__(self, head: "CudaHead", leading: Leading) -> None:
        self.page_size, self.features_of = head.page_size, head.features_of
        self._head, self._leading = head, leading

    def run(self, plan: StepPlan, given: Tensor) -> Drawn | None:
        return self._leading.guess(plan, lambda: self._head.run(plan, given))


class LeadingLaunches(Leading):
    """Rank 0's runner where each rank has a device, and launches steps that others launch as well."""

    def __init__(self, runner: LaunchingRunner, followers: Followers) -> None:
        super().__init__(runner, followers, followers.begin)
        self._launching = runner
        self._has_left_step = False  # one was not launched here that the others have begun

    def start(self, plan: StepPlan) -> None:
        """Launch a step on all ranks. What fails here behind the last sum is computed again: see `run`."""
        self._followers.are_waiting = False
        self._begin(plan)
        self._has_left_step = True
        self._launching.start(plan)
        self._has_left_step = False

    def finish(self) -> StepResult:
        """Wait for the oldest step in flight, on all ranks."""
        result = self._launching.finish()
        self._followers.end()
        return result

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step while no other is in flight.

        DeviceError if others still wait in a sum of the step that was not launched.
        """
        if self._has_left_step:
            self._end_others()
            self._has_left_step = False
        return super().run(plan)
