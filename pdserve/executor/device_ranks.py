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

from torch import Tensor

from pdserve.base.errors import DeviceError
from pdserve.base.signals import end_served
from pdserve.checkpoint.checkpoint import weights_in_form
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import StepPlan
from pdserve.executor.executor import Executor
from pdserve.executor.followers import Followers
from pdserve.executor.form import Form, Progress, check_inputs, load_form
from pdserve.executor.node_ranks import join_group
from pdserve.executor.rank_frames import Ended, OwnPages, Pages, Setup
from pdserve.executor.rank_group import LOOPBACK, GroupRanks, device_of_rank, within
from pdserve.executor.rank_memory import check_on_devices, device_pages
from pdserve.executor.ranked import Leading, RankedExecutor
from pdserve.model.family import Model
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel
from pdserve.protocol.kvlayout import KvLayout
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
    room: Callable[[Model], int]  # how many pages fit on a device beside a rank's part


def load_on_devices(
    config: WorkerConfig,
    form: Form,
    fitting: Fitting,
    thread: ThreadPoolExecutor,
    places: "tuple[str, Nodes | None]",
    progress: Progress,
) -> tuple[Executor, KvLayout, Limits]:
    """Start the other ranks, and load this one beside them.

    places: the name of the device, as routers know it, and the other machines, if the worker has several.
    """
    checkpoint = form.checkpoint
    check_on_devices(config, checkpoint.config, weights_in_form(checkpoint, form.quantization, config.device))
    (name, nodes), layout = places, fitting.layout
    device = device_of_rank(config.device, 0, config.degrees.ranks_per_node)
    ranks = GroupRanks(Rank.at(0, config.degrees), device, LOOPBACK if nodes is None else nodes.host)
    followers = Followers(config, form, fitting.num_pages, layout, ranks, nodes)
    try:
        model = load_form(config, form, ranks.device, ranks, progress)
        check_inputs(config, model)
        num_pages = min(fitting.num_pages or fitting.room(model), *followers.meet())
        limits = fitting.limits(num_pages)
        with within(START_S, "the ranks' first steps"), _ending_the_process():
            followers.join(ranks, num_pages)
            runner = _runner(model, ranks, config, limits, (num_pages, followers.make_pages(num_pages)))
            followers.end()
            runner.capture(Leading(runner, followers, followers.begin).run)
        executor = RankedExecutor(runner, followers, thread, name, config.test_step_s)
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

    def __init__(self, config: WorkerConfig, form: Form, fitting: Fitting, setup: Setup, channel: Channel) -> None:
        """Load it, and get ready beside the other ranks. channel: to rank 0."""
        self._index, self._channel = setup.index, channel
        here = config.degrees.ranks_per_node
        place = config.device, setup.index % here, here
        device = device_of_rank(*place)
        self._ends = ThreadPoolExecutor(1, "step-ends", device_of_rank, place)  # CUDA's device is a thread's own
        ranks = GroupRanks(Rank.at(setup.index, config.degrees), device, setup.host or LOOPBACK)
        model = load_form(config, form, device, ranks)
        channel.send(Ended(num_pages=fitting.num_pages or fitting.room(model)))
        num_pages = channel.receive(Pages).num_pages
        join_group(ranks, setup.slots, channel, config.stalled_step_s)
        assert isinstance(setup.pages, OwnPages), "ranks with devices have memory of their own"
        memory, self.region = device_pages(num_pages, setup.pages, device)
        self._runner = _runner(model, ranks, config, fitting.limits(num_pages), (num_pages, memory))

    def follow(self, plan: StepPlan) -> None:
        """Launch this rank's part of a step; rank 0 is told when it has ended."""
        self._runner.start(plan)
        self._ends.submit(self._end)

    def _end(self) -> None:
        try:
            self._runner.finish()
        except Exception as error:
            logger.exception("a step failed")
            self._channel.send(Ended(f"rank {self._index}: {type(error).__name__}: {error}"))
            end_served(0)
        self._channel.send(Ended())


def _runner(
    model: Model, ranks: GroupRanks, config: WorkerConfig, limits: Limits, pages: tuple[int, Tensor]
) -> "CudaRunner":
    # A CPU worker has no need of Triton.
    from pdserve.engine.runner_cuda import CudaRunner, DevicePart  # noqa: PLC0415

    num_pages, memory = pages
    return CudaRunner(model, num_pages, config.page_size, limits, None, DevicePart(memory, ranks.spread))
