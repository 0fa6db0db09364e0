"""Moves pages with NIXL over UCX: RDMA, shared memory or TCP, whichever of the configured ones UCX finds (`ucx.py`).

The bindings are used directly: the package's wrapper gives its progress thread no pause, which costs a third of a core
in an idle process. With a pause the thread sleeps on UCX's file descriptors, and the passive side needs it: connections
and TCP's copies do not advance without it.

Where pages are a GPU's, NIXL gets no thread: that one calls CUDA without a context and may end the process (NIXL's
issues 2102 and 2103). The mover's thread does its work, once the GPU's context is its own.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from pdserve.base.errors import ConfigError, InvariantError
from pdserve.base.ids import Peer
from pdserve.kvtransfer.backends.backend import Connection, Indices, PostError, TransferLostError, Way, row_indices
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.region import Description, Region
from pdserve.kvtransfer.routes import Rows

try:
    import nixl_cu13._bindings as nixl  # whose UCX wants the CUDA runtime of torch for CUDA 13
except ModuleNotFoundError:
    import nixl_cu12._bindings as nixl

PROGRESS_S = 2e-3  # between two looks at what others write here, where NIXL has no thread of its own
PROGRESS_PAUSE_US = 100_000  # longest sleep of the progress thread while no file descriptor wakes it

_ERRORS = tuple(each for each in vars(nixl).values() if isinstance(each, type) and issubclass(each, Exception))


class NixlBackend:
    """One NIXL agent over UCX, and this process's region registered with it."""

    name = "nixl"
    carrier = ""  # UCX does not say

    def __init__(
        self, me: Peer, region: Region, network: Network, fail_share: float = 0.0, *, has_thread: bool | None = None
    ) -> None:
        """`fail_share`: of the slices that are made to fail, for testing. ConfigError: UCX cannot be confined.

        `has_thread`: whether NIXL gets a thread of its own; by default it does where pages are in the host's memory.
        """
        if region.gpu is not None:
            bind_thread(region.gpu)  # UCX looks for its ways to a GPU where one is current
        self.region = region  # stays alive while UCX may read it
        self._has_thread = region.gpu is None if has_thread is None else has_thread
        own = "" if region.share is None else f"-{region.share.layers}-{region.share.heads}-{region.share.copy}"
        name = f"{me.worker_id}-{me.incarnation:016x}{own}"  # each rank with memory of its own has an agent
        self.agent = start_agent(name, network, gpu=region.gpu is not None, has_thread=self._has_thread)
        self._sources: dict[Region, nixl.nixlRegDList] = {}  # registered memory
        self._lists: dict[tuple[Region, Rows | None], int] = {}  # of its pages, or of what a route takes of them
        self.prepared(region)
        self.metadata: bytes = self.agent.getLocalMD()
        if not self.metadata:
            raise InvariantError("NIXL describes itself with nothing")
        self._fail_share = fail_share
        self._faults = random.Random(me.worker_id)

    def begin(self) -> None:
        if self.region.gpu is not None:
            bind_thread(self.region.gpu)

    def progress(self) -> float | None:
        if self._has_thread:
            return None
        self.agent.getNotifs({})
        return PROGRESS_S

    def prepared(self, source: Region, rows: Rows | None = None) -> int:
        """Return the handle of the list of a region's rows, or pages. It is registered before its first use."""
        here = source.description()
        if source not in self._sources:
            segment, runs = _memory_of(here, None)
            whole = [(address, row_bytes * count, gpu, "") for address, row_bytes, gpu, _, count in runs]
            memory = self._sources[source] = nixl.nixlRegDList(segment, whole)
            self.agent.registerMem(memory, [])
        if (source, rows) not in self._lists:
            self._lists[source, rows] = self._prepare(nixl.NIXL_INIT_AGENT, here, rows)
        return self._lists[source, rows]

    def connect(self, way: Way, source: Region) -> Connection:
        theirs, ours = (None, None) if way.route is None else (way.route.target, way.route.source)
        try:
            peer = self.agent.loadRemoteMD(way.there.metadata).decode()
        except _ERRORS as error:
            raise PostError(_reason(error)) from error
        try:
            handles = self._prepare(peer, way.there, theirs), self.prepared(source, ours)
            return _Connection(self, peer, *handles, way)
        except _ERRORS as error:
            self.disconnect(peer)
            raise PostError(_reason(error)) from error

    def disconnect(self, peer: str) -> None:
        """Disconnect from an agent. NIXL has done so by itself after some errors."""
        with suppress(nixl.nixlNotFoundError):
            self.agent.invalidateRemoteMD(peer)

    def _prepare(self, agent: str, memory: Description, rows: Rows | None) -> int:
        """Return the handle of a prepared list of pages, or of a route's rows; then come the rows of probe memory."""
        segment, runs = _memory_of(memory, rows)
        handle: int = self.agent.prepXferDlist(agent, segment, np.array(runs, np.uint64), [])
        return handle

    def inject_fault(self) -> None:
        """Raise PostError for the share of slices that is made to fail: the same ones in each run."""
        if self._fail_share and self._faults.random() < self._fail_share:
            raise PostError("made to fail, for testing")

    def cut(self, peer: Peer) -> None:
        """Do nothing: what UCX has read from the network is in its page, as far as can be known."""

    def close(self, *, in_flight: bool) -> None:
        if not in_flight:
            for pages in self._lists.values():
                self.agent.releasedDlistH(pages)
            for memory in self._sources.values():
                self.agent.deregisterMem(memory, [])
            del self.agent


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """A peer's agent, and the prepared list of its pages."""

    _backend: NixlBackend
    _peer: str
    _pages: int  # handle of the list
    _source: int  # handle of the list of what is written
    _way: Way

    def post(self, src: Indices, dst: Indices) -> "_Transfer | None":
        self._backend.inject_fault()
        if (route := self._way.route) is not None:
            src, dst = row_indices(src, route.source), row_indices(dst, route.target)
        agent = self._backend.agent
        try:
            handle: int = agent.makeXferReq(nixl.NIXL_WRITE, self._source, src, self._pages, dst, "", [])
        except _ERRORS as error:
            raise PostError(_reason(error)) from error
        transfer = _Transfer(agent, handle)
        return None if transfer.is_over(lambda: agent.postXferReq(handle, "")) else transfer

    def close(self) -> None:
        self._backend.agent.releasedDlistH(self._pages)
        self._backend.disconnect(self._peer)


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    _agent: nixl.nixlAgent
    _handle: int

    def has_landed(self) -> bool:
        return self.is_over(lambda: self._agent.getXferStatus(self._handle))

    def is_over(self, status_of: Callable[[], object]) -> bool:
        """Return whether the transfer has landed by its status. It is released when it has ended."""
        try:
            status = status_of()
        except _ERRORS as error:
            self._agent.releaseXferReq(self._handle)
            raise TransferLostError(_reason(error)) from error
        if status == nixl.NIXL_IN_PROG:
            return False
        self._agent.releaseXferReq(self._handle)
        if status != nixl.NIXL_SUCCESS:
            raise TransferLostError(str(status))
        return True


def bind_thread(gpu: int) -> None:
    """Give this thread the context of a GPU, without which UCX finds no way to its memory but TCP."""
    import torch  # noqa: PLC0415 - a process without GPUs may do without

    torch.cuda.set_device(gpu)
    torch.zeros(1, device=f"cuda:{gpu}")  # the first call makes the context current


def start_agent(name: str, network: Network, *, gpu: bool, has_thread: bool = True) -> nixl.nixlAgent:
    """Start an agent with UCX. ConfigError where UCX cannot be confined to the network."""
    config = nixl.nixlAgentConfig()
    config.useProgThread = has_thread
    config.pthrDelay = PROGRESS_PAUSE_US
    config.useListenThread = False
    config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    agent = nixl.nixlAgent(name, config)
    with network.confine(gpu=gpu):
        try:
            agent.createBackend("UCX", {})
        except _ERRORS as error:
            raise ConfigError(f"mover: NIXL cannot start UCX over {network}: {_reason(error)}") from error
    return agent


def _memory_of(memory: Description, rows: Rows | None) -> tuple[nixl.nixl_mem_t, list[tuple[int, int, int, int, int]]]:
    """Return which kind of memory pages and probe memory are, and a strided run for each.

    A run is (address, row bytes, GPU, bytes from row to row, rows). rows: of each page, also of probe memory.
    """
    segment, gpu = (nixl.DRAM_SEG, 0) if memory.gpu is None else (nixl.VRAM_SEG, memory.gpu)
    size = memory.page_bytes
    rows = rows or Rows(0, size, size, 1, 0, 1)
    places = (memory.address, memory.num_pages), (memory.probe_address, memory.num_probe_pages)
    return segment, [(start + rows.offset, rows.length, gpu, rows.stride, n * rows.per_page) for start, n in places]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__.removeprefix('nixl')}: {error}"
