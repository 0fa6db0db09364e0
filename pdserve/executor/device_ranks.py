"""Loads a model on ranks that each have a device of their own: the first one, and in their processes the others.

All load their parts at once. Then rank 0 knows how many pages fit on each device, all join a group of
torch.distributed, and rank 0 leads them through the steps that compile kernels and that are captured.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdserve.base.errors import DeviceError
from pdserve.base.signals import end_served
from pdserve.checkpoint.checkpoint import weights_in_form
from pdserve.engine.batch import Ints
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import StepPlan
from pdserve.executor.draft_loading import Drafts, LoadedDrafts, drafter_of, follow_head, load_guessing
from pdserve.executor.executor import Executor
from pdserve.executor.followers import Followers
from pdserve.executor.form import Form, Progress, check_inputs, load_form
from pdserve.executor.node_ranks import join_group
from pdserve.executor.rank_frames import Ended, Kept, OwnPages, Pages, Setup, Step, keep_states, plan_of
from pdserve.executor.rank_group import LOOPBACK, GroupRanks, device_of_rank, within
from pdserve.executor.rank_memory import check_on_devices, device_pages
from pdserve.executor.ranked import Leading, LeadingHead, RankedExecutor
from pdserve.model.family import Model
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel
from pdserve.protocol.kvlayout import KvLayout, coded_as
from pdserve.settings.config import WorkerConfig

if TYPE_CHECKING:
    from pdserve.engine.runner_cuda import CudaRunner
    from pdserve.executor.joining import Nodes

logger = logging.getLogger(__name__)

START_S = 1800.0  # for all ranks to meet, and for the steps that compile and are captured


@dataclass(frozen=True, slots=True)
class Fitting:
    """What settings make of a model's pages."""

    layout: KvLayout
    num_pages: int | None  # None: as many as fit on each device
    limits: Callable[[int], Limits]  # of steps over so many pages
    room: Callable[[Model, LoadedDrafts | None], int]  # how many pages fit on a device beside what a rank has loaded


def load_on_devices(
    config: WorkerConfig,
    forms: tuple[Form, Drafts],
    fitting: Fitting,
    thread: ThreadPoolExecutor,
    places: "tuple[str, Nodes | None]",
    progress: Progress,
) -> tuple[Executor, KvLayout, Limits]:
    """Start the other ranks, and load this one beside them.

    forms: of the model, and of what guesses: each rank has a part of a head, and this one alone a draft model.
    places: the name of the device, as routers know it, and the other machines, if the worker has several.
    """
    (form, drafts), (name, nodes), layout = forms, places, fitting.layout
    checkpoint = form.checkpoint
    check_on_devices(config, checkpoint.config, weights_in_form(checkpoint, form.quantization, config.device))
    device = device_of_rank(config.device, 0, config.degrees.ranks_per_node)
    ranks = GroupRanks(Rank.at(0, config.degrees), device, LOOPBACK if nodes is None else nodes.host)
    followers = Followers(config, form, fitting.num_pages, layout, ranks, nodes)
    try:
        model = load_form(config, form, ranks.device, ranks, progress)
        check_inputs(config, model)
        guessing = load_guessing(config, drafts, form, model, (fitting.num_pages, layout), ranks)
        num_pages = min(fitting.num_pages or fitting.room(model, guessing), *followers.meet())
        limits = fitting.limits(num_pages)
        with within(START_S, "the ranks' first steps"), _ending_the_process():
            followers.join(ranks, num_pages)
            pages = followers.make_pages(num_pages), num_pages, layout
            runner = _runner(model, ranks, config, limits, pages, followers.keep)
            followers.end()
            leading = Leading(runner, followers, followers.begin)
            drafter = drafter_of(guessing, runner, layout.page_size, limits, lambda head: LeadingHead(head, leading))
            runner.capture(leading.run)
        executor = RankedExecutor(runner, followers, thread, name, config.test_step_s, drafter)
    except BaseException:
        followers.close()
        raise
    return executor, layout, limits


@contextmanager
def _ending_the_process() -> Iterator[None]:
    """Make each failure a DeviceError, at which a worker ends its process at once.

    Python's own shutdown would wait for NCCL as long as graphs that captured its operations are there.
    """
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        raise DeviceError(f"the ranks' first steps: {type(error).__name__}: {error}") from error


class DeviceFollower:
    """The part of a rank that is not the first."""

    def __init__(
        self, config: WorkerConfig, forms: tuple[Form, Drafts], fitting: Fitting, setup: Setup, channel: Channel
    ) -> None:
        """Load it, and get ready beside the other ranks. forms: of the model and of a head. channel: to rank 0."""
        form, drafts = forms
        self._index, self._channel = setup.index, channel
        here = config.degrees.ranks_per_node
        place = config.device, setup.index % here, here
        device = device_of_rank(*place)
        self._ends = ThreadPoolExecutor(1, "step-ends", device_of_rank, place)  # CUDA's device is a thread's own
        ranks = GroupRanks(Rank.at(setup.index, config.degrees), device, setup.host or LOOPBACK)
        model, guessing = load_form(config, form, device, ranks), None
        if not isinstance(drafts, Form):
            guessing = load_guessing(config, drafts, form, model, (fitting.num_pages, fitting.layout), ranks)
        channel.send(Ended(num_pages=fitting.num_pages or fitting.room(model, guessing)))
        num_pages = channel.receive(Pages).num_pages
        join_group(ranks, setup.slots, channel, config.stalled_step_s)
        assert isinstance(setup.pages, OwnPages), "ranks with devices have memory of their own"
        memory, self.region = device_pages(num_pages, setup.pages, device)
        limits = fitting.limits(num_pages)
        self._runner = _runner(model, ranks, config, limits, (memory, num_pages, fitting.layout))
        self._head = follow_head(guessing, self._runner, limits)

    def follow(self, step: Step) -> None:
        """Launch this rank's part of a step or of a head's pass; rank 0 is told when it has ended."""
        if step.is_guessing:
            self._guess(plan_of(step))
            return
        self._runner.start(plan_of(step))
        if self._runner.has_states and step.has_guesses:
            keep_states(self._runner, self._channel.receive(Kept))  # what rank 0 says next
        self._ends.submit(self._end)

    def _guess(self, plan: StepPlan) -> None:
        """Compute a pass of the head, while no step is under way."""
        assert self._head is not None, "rank 0 has one as well"
        self._head.run(plan, None)
        if (device := self._runner.kv.device).type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self._channel.send(Ended())

    def _end(self) -> None:
        try:
            self._runner.finish()
        except Exception as error:
            logger.exception("a step failed")
            self._channel.send(Ended(f"rank {self._index}: {type(error).__name__}: {error}"))
            end_served(0)
        self._channel.send(Ended())


def _runner(
    model: Model,
    ranks: GroupRanks,
    config: WorkerConfig,
    limits: Limits,
    pages: tuple[Tensor, int, KvLayout],
    keep: Callable[[Ints | None], None] | None = None,
) -> "CudaRunner":
    # A CPU worker has no need of Triton.
    from pdserve.engine.device_pages import DevicePages  # noqa: PLC0415
    from pdserve.engine.runner_cuda import CudaRunner  # noqa: PLC0415

    memory, num_pages, layout = pages
    kept = DevicePages(memory, ranks.spread, coded_as(layout.dtype), keep)
    return CudaRunner(model, num_pages, config.page_size, limits, None, kept)
