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
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import torch
from torch import Tensor

from pdserve.base.errors import ConfigError, DeviceError, InvariantError
from pdserve.base.processes import DEVICE_EXIT_STATUS
from pdserve.engine.drafting import Drafter
from pdserve.engine.runner import EngineRunner, LaunchingRunner
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.form import Form
from pdserve.executor.joining import Nodes, RemoteRank
from pdserve.executor.local import LocalExecutor
from pdserve.executor.node_ranks import NodeRanks, store_for
from pdserve.executor.rank_frames import Ended, OwnPages, Pages, Setup, step_of
from pdserve.executor.rank_group import GroupRanks, within
from pdserve.executor.rank_memory import device_pages, mapped_pages, new_pages, own_pages, region_of
from pdserve.executor.rank_process import start_rank
from pdserve.executor.rank_sums import check_library, ranks_of, slots_bytes
from pdserve.executor.steps_ahead import StepsAhead
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.kvtransfer.region import Region
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel
from pdserve.protocol.kvlayout import KvLayout
from pdserve.settings.config import WorkerConfig

logger = logging.getLogger(__name__)

LOAD_S = 1800.0  # for a rank to load once rank 0 has loaded a part of that size, beside it
END_S = 5.0  # for a rank that has nothing to do
STUCK_S = 2.0  # for a rank whose part takes no longer than that which has failed


class Followers:
    """The processes of all ranks but the first. For one thread; they end when it does."""

    def __init__(
        self,
        config: WorkerConfig,
        form: Form,
        num_pages: int | None,
        layout: KvLayout,
        own: GroupRanks | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """Start them; they load their parts meanwhile.

        num_pages: None: as many as fit on each rank's device. own: the first of ranks that have devices of their own.
        nodes: the other machines, if the worker has several.
        """
        self._children: list[tuple[subprocess.Popen[bytes] | RemoteRank, Channel]] = []
        self._nodes, self._limit_s = nodes, config.stalled_step_s
        self._is_closing = self._have_met = False
        self.are_waiting = False  # for a step: else one may be stuck in a sum, or loading
        self.drain_s = 2 * config.stalled_step_s  # two steps may be under way
        degrees, has_library = config.degrees, not isinstance(library(), Missing)
        check_library(degrees)
        memory, host = None, "" if nodes is None else nodes.host
        self.slots = new_pages(slots_bytes(degrees) if own is None and nodes is None else 0)
        self.mover_sockets, size = tuple[socket.socket, ...](), degrees.num_ranks
        ranks = [Rank.at(index, degrees) for index in range(size) if config.rank_memory == "own"]
        self._owns = owns = [own_pages(rank, layout) for rank in ranks]
        if own is None:
            assert num_pages is not None, "CPUs have as many pages as they are asked for"
            memory = new_pages(num_pages * (owns[0] if owns else layout).page_bytes)
        loaded = (str(form.checkpoint.path), form.weights_hash)
        told = config if nodes is None else nodes.told(config, form.dtype)
        settings = told.model_dump_json(exclude={"speculative_config"})  # rank 0 guesses, and verifies
        try:
            for index in range(1, size):
                pages, slots = owns[index] if owns else memory, self.slots if nodes is None else None
                assert pages is not None, "ranks with devices have memory of their own"
                setup = Setup(settings, *loaded, index, size, slots, pages, num_pages, has_library, host=host)
                setup.num_head_layers = form.checkpoint.config.num_head_layers
                self._add(setup)
        except BaseException:
            self.close()
            raise
        finally:
            self.memory = None if memory is None else mapped_pages(memory)  # of this rank's pages
            self.region = region_of(self.memory, owns[0]) if owns and self.memory is not None else None
            channels, rank, slots = self._channels, Rank.at(0, degrees), self.slots
            own = own if nodes is None else NodeRanks(rank, host)
            self.ranks = own or ranks_of(rank, mapped_pages(slots), channels, config.stalled_step_s)

    def _add(self, setup: Setup) -> None:
        """Start a rank, and tell it what it is to load."""
        process: subprocess.Popen[bytes] | RemoteRank
        if self._nodes is not None and setup.index in self._nodes:
            process, connected, driven = self._nodes.start(setup.index)
            self.mover_sockets += (driven,)
        elif isinstance(setup.pages, OwnPages):
            driven, theirs = socket.socketpair()
            self.mover_sockets += (driven,)
            with theirs:
                setup.mover = theirs.fileno()
                process, connected = start_rank(setup.slots, setup.mover)
        else:
            process, connected = start_rank(setup.slots, setup.pages)
        channel = Channel(connected)
        self._children.append((process, channel))
        watched = setup.index, process
        threading.Thread(target=self._watch, args=watched, name=f"rank-{setup.index}", daemon=True).start()
        channel.send(setup)

    def meet(self) -> list[int]:
        """Wait until all have loaded; return for how many pages each has room that has a device of its own.

        ConfigError says what one of them has refused.
        """
        rooms = self.end(LOAD_S)
        self._have_met = True
        return rooms

    def join(self, num_pages: int) -> None:
        """Let ranks of several machines meet once all have loaded; others share memory from the start."""
        if not isinstance(self.ranks, NodeRanks):
            return
        self._tell(num_pages)
        try:
            with store_for(self._channels, self._limit_s) as store:
                self.ranks.meet(store, self._limit_s)
        except RuntimeError as error:
            raise DeviceError(f"ranks of several machines do not meet: {error}") from error
        self.end(self._limit_s)

    def give_pages(self, num_pages: int) -> Tensor:
        """Let all make so many pages on their devices, and join the group, as this rank does beside them.

        Returns the memory of this rank's.
        """
        self._tell(num_pages)
        memory, self.region = device_pages(num_pages, self._owns[0], self.ranks.device)
        return memory

    def _tell(self, num_pages: int) -> None:
        for _, channel in self._children:
            channel.send(Pages(num_pages))

    def begin(self, plan: StepPlan) -> None:
        """Let all do their parts of a step."""
        step = step_of(plan)
        for index, (_, channel) in enumerate(self._children, start=1):
            try:
                channel.send(step)
            except OSError as error:
                raise DeviceError(f"rank {index}: its process has ended") from error

    def copy(self, plan: StepPlan, copy: Callable[[StepPlan], StepResult]) -> StepResult:
        """Copy pages on all ranks that have them; `copy` does on the first one."""
        if not self._owns:
            return copy(plan)
        self.are_waiting = False
        self.begin(plan)
        result = copy(plan)
        self.end()
        return result

    def end(self, limit_s: float | None = None) -> list[int]:
        """Wait until all have done what they were told to. DeviceError where one has failed, or takes too long."""
        rooms = []
        for index, (_, channel) in enumerate(self._children, start=1):
            channel.limit(limit_s)
            try:
                ended = channel.receive(Ended)
            except (TimeoutError, msgspec.ValidationError) as error:  # or its part of a sum comes instead
                raise DeviceError(f"rank {index}: it waits for another one, or is stopped") from error
            except (OSError, EOFError) as error:
                raise DeviceError(f"rank {index}: its process has ended") from error
            if ended.failure:
                raise (ConfigError if ended.is_refusal else DeviceError)(ended.failure)
            rooms.append(ended.num_pages)
        self.are_waiting = True
        return rooms

    def close(self) -> None:
        """End them; blocks."""
        self._is_closing = True
        for driven in self.mover_sockets:
            driven.close()
        for _, channel in self._children:
            channel.close()
        for process, _ in self._children:
            try:
                process.wait(END_S if self.are_waiting else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def _channels(self) -> list[Channel]:
        return [channel for _, channel in self._children]

    def _watch(self, index: int, process: "subprocess.Popen[bytes] | RemoteRank") -> None:
        """End this process at once if a child ends first, so that routers do not place requests here.

        With status 0 it has said why it could not load: `meet` raises that.
        """
        status = process.wait()
        if not self._is_closing and (status or self._have_met):
            logger.critical("the device is broken: rank %d has ended with status %d: this process ends", index, status)
            os._exit(DEVICE_EXIT_STATUS)


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

        drafter: guesses on this rank alone, while the others wait for the next step.
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
        try:
            result = self._runner.run(plan)
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
