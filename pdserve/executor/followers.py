"""The ranks of a worker that are not the first, as the first one starts, tells and ends them: see `ranked`."""

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from pdserve.base.errors import ConfigError, DeviceError
from pdserve.base.processes import DEVICE_EXIT_STATUS
from pdserve.engine.batch import Ints
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.form import Form
from pdserve.executor.node_ranks import NodeRanks, store_for
from pdserve.executor.rank_frames import Ended, Kept, OwnPages, Pages, Setup, Step, step_of
from pdserve.executor.rank_group import GroupRanks
from pdserve.executor.rank_memory import device_pages, mapped_pages, new_pages, own_pages, region_of
from pdserve.executor.rank_process import start_rank
from pdserve.executor.rank_sums import check_library, ranks_of, slots_bytes
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel
from pdserve.protocol.kvlayout import KvLayout
from pdserve.settings.config import WorkerConfig

if TYPE_CHECKING:
    from pdserve.executor.joining import Nodes, RemoteRank

logger = logging.getLogger(__name__)

LOAD_S = 1800.0  # for a rank to load once rank 0 has loaded a part of that size, beside it
END_S = 5.0  # for a rank that has nothing to do


class Followers:
    """The processes of all ranks but the first. For one thread; they end when it does."""

    def __init__(
        self,
        config: WorkerConfig,
        form: Form,
        num_pages: int | None,
        layout: KvLayout,
        own: GroupRanks | None = None,
        nodes: "Nodes | None" = None,
    ) -> None:
        """Start them; they load their parts meanwhile.

        num_pages: None: as many as fit on each rank's device. own: the first of ranks that have devices of their own.
        nodes: the other machines, if the worker has several.
        """
        self._children: list[tuple[subprocess.Popen[bytes] | RemoteRank, Channel]] = []
        self._nodes, self._limit_s = nodes, config.stalled_step_s
        self._is_closing = self._have_met = False
        self._have_states, self._are_to_keep = form.checkpoint.config.has_states, False
        self._have_devices = own is not None  # then each keeps a step's states itself where it has no guesses
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
        settings = told.model_dump_json(exclude_unset=True)  # some settings that are given refuse others
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
            channels, rank = [channel for _, channel in self._children], Rank.at(0, degrees)
            own = own or (None if nodes is None else NodeRanks(rank, host))
            self.ranks = own or ranks_of(rank, mapped_pages(self.slots), channels, config.stalled_step_s)

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
        _send(channel, setup, setup.index)

    def meet(self) -> list[int]:
        """Wait until all have loaded; return for how many pages each has room that has a device of its own.

        ConfigError says what one of them has refused.
        """
        rooms = self.end(LOAD_S)
        self._have_met = True
        return rooms

    def meet_nodes(self, num_pages: int) -> None:
        """Let ranks of several machines' CPUs meet once all have loaded; others share memory from the start."""
        if isinstance(self.ranks, NodeRanks):
            self.join(self.ranks, num_pages)
            self.end(self._limit_s)

    def join(self, ranks: GroupRanks, num_pages: int) -> None:
        """Let all join a group, this rank as well. Behind that the others make so many pages on their devices."""
        for _, channel in self._children:
            channel.send(Pages(num_pages))
        if self._nodes is None:
            ranks.join(self.slots, self._limit_s)
            return
        try:
            with store_for([channel for _, channel in self._children], self._limit_s) as store:
                ranks.meet(store, self._limit_s)
        except RuntimeError as error:
            raise DeviceError(f"ranks of several machines do not meet: {error}") from error

    def make_pages(self, num_pages: int) -> Tensor:
        """Return memory for so many pages of this rank, on its device."""
        memory, self.region = device_pages(num_pages, self._owns[0], self.ranks.device)
        return memory

    def begin(self, plan: StepPlan, *, is_guessing: bool = False) -> None:
        """Let all do their parts of a step, or of a pass in which a head guesses."""
        step = step_of(plan, is_guessing=is_guessing)
        self._send_all(step)
        self._are_to_keep = self._have_states and (step.has_guesses or not self._have_devices)

    def keep(self, num_kept: Ints | None) -> None:
        """Let all write the states of a step that is computed and sampled: see `Runner.commit`."""
        self._are_to_keep = False
        self._send_all(Kept(num_tokens=None if num_kept is None else num_kept.tolist()))

    def _send_all(self, message: Step | Kept) -> None:
        for index, (_, channel) in enumerate(self._children, start=1):
            _send(channel, message, index)

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
        """Wait until all have done what they were told to. DeviceError where one has failed, or takes too long.

        A step that was not followed by `keep` has failed here: its states are not written.
        """
        rooms = []
        if self._are_to_keep:
            self._are_to_keep = False
            self._send_all(Kept(is_failed=True))
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

    def _watch(self, index: int, process: "subprocess.Popen[bytes] | RemoteRank") -> None:
        """End this process at once if a child ends first, so that routers do not place requests here.

        With status 0 it has said why it could not load: `meet` raises that.
        """
        status = process.wait()
        if not self._is_closing and (status or self._have_met):
            is_remote = self._nodes is not None and index in self._nodes
            how = "its machine has left" if is_remote else f"its process has ended with status {status}"
            logger.critical("the device is broken: rank %d: %s: this process ends", index, how)
            os._exit(DEVICE_EXIT_STATUS)


def _send(channel: Channel, message: Setup | Step | Kept, index: int) -> None:
    """Send a rank a message. DeviceError where its process has ended."""
    try:
        channel.send(message)
    except OSError as error:
        raise DeviceError(f"rank {index}: its process has ended") from error
