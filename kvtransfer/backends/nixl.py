"""Moves pages with NIXL over UCX: RDMA, shared memory or TCP, whichever UCX finds of the configured ways (`ucx.py`).

The bindings are used directly: the package's wrapper gives its progress thread no pause, which costs a third of a core
in an idle process. With a pause the thread sleeps on UCX's file descriptors, and the passive side needs it: connections
and TCP's copies do not advance without it.
"""

from contextlib import suppress
from dataclasses import dataclass

import nixl_cu12._bindings as nixl
import numpy as np

from pdserve.errors import ConfigError, InvariantError
from pdserve.kvtransfer.backends.faulty import FaultyLane
from pdserve.kvtransfer.backends.lane import Indices, LaneError, SliceLostError
from pdserve.kvtransfer.backends.pump import Pump
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.mover import Description, OnStopped, Region
from pdserve.kvtransfer.session import Peer

PROGRESS_PAUSE_US = 100_000  # longest sleep of the progress thread while no file descriptor wakes it

_ERRORS = (
    nixl.nixlBackendError,
    nixl.nixlCancelledError,
    nixl.nixlInvalidParamError,
    nixl.nixlMismatchError,
    nixl.nixlNotAllowedError,
    nixl.nixlNotFoundError,
    nixl.nixlNotPostedError,
    nixl.nixlNotSupportedError,
    nixl.nixlRemoteDisconnectError,
    nixl.nixlRepostActiveError,
    nixl.nixlUnknownError,
)


@dataclass(frozen=True, slots=True)
class _Remote:
    agent: str
    pages: int  # handle of its prepared list: descriptor i is page i


class NixlLane:
    """One NIXL agent over UCX, and this process's memory registered with it."""

    carrier = ""  # UCX does not say

    def __init__(self, agent_name: str, region: Region, network: Network) -> None:
        """ConfigError where UCX cannot be confined to the network."""
        self._agent = nixl.nixlAgent(agent_name, _agent_config())
        with network.confine(gpu=region.gpu is not None):
            try:
                self._agent.createBackend("UCX", {})
            except _ERRORS as error:
                raise ConfigError(f"mover: NIXL cannot start UCX over {network}: {_words(error)}") from error
        segment, gpu = _memory_of(region)
        pages = (region.address, region.num_pages * region.page_bytes, gpu, "")
        probe = (region.probe_address, len(region.probe) * region.page_bytes, gpu, "")
        self._memory = nixl.nixlRegDList(segment, [pages, probe])
        self._agent.registerMem(self._memory, [])
        self._region = region  # stays alive while UCX may read it
        runs = (region.address, region.num_pages), (region.probe_address, len(region.probe))
        self._pages = self._prepare(nixl.NIXL_INIT_AGENT, region, *runs)
        self.metadata: bytes = self._agent.getLocalMD()

    def open(self, description: Description) -> _Remote:
        try:
            agent = self._agent.loadRemoteMD(description.lane).decode()
        except _ERRORS as error:
            raise LaneError(_words(error)) from error
        try:
            pages = (description.address, description.num_pages)
            probe = (description.probe_address, description.num_probe_pages)
            return _Remote(agent, self._prepare(agent, description, pages, probe))
        except _ERRORS as error:
            self._drop(agent)
            raise LaneError(_words(error)) from error

    def shut(self, remote: _Remote) -> None:
        self._agent.releasedDlistH(remote.pages)
        self._drop(remote.agent)

    def _drop(self, agent: str) -> None:
        """Disconnect from an agent. NIXL has dropped it by itself after some errors."""
        with suppress(nixl.nixlNotFoundError):
            self._agent.invalidateRemoteMD(agent)

    def post(self, remote: _Remote, src: Indices, dst: Indices) -> int | None:
        try:
            handle: int = self._agent.makeXferReq(nixl.NIXL_WRITE, self._pages, src, remote.pages, dst, "", [])
        except _ERRORS as error:
            raise LaneError(_words(error)) from error
        try:
            status = self._agent.postXferReq(handle, "")
        except _ERRORS as error:
            self._agent.releaseXferReq(handle)
            raise SliceLostError(_words(error)) from error
        return None if self._is_over(handle, status) else handle

    def landed(self, posted: int) -> bool:
        try:
            status = self._agent.getXferStatus(posted)
        except _ERRORS as error:
            self._agent.releaseXferReq(posted)
            raise SliceLostError(_words(error)) from error
        return self._is_over(posted, status)

    def close(self) -> None:
        self._agent.releasedDlistH(self._pages)
        self._agent.deregisterMem(self._memory, [])
        del self._agent

    def _is_over(self, handle: int, status: object) -> bool:
        if status == nixl.NIXL_IN_PROG:
            return False
        self._agent.releaseXferReq(handle)
        if status != nixl.NIXL_SUCCESS:
            raise SliceLostError(str(status))
        return True

    def _prepare(self, agent: str, owner: Region | Description, *memory: tuple[int, int]) -> int:
        """Prepare strided runs (address, num_pages), one after the other: descriptor i is page i, then probe memory."""
        segment, gpu = _memory_of(owner)
        size = owner.page_bytes
        runs = np.array([[address, size, gpu, size, num_pages] for address, num_pages in memory], np.uint64)
        handle: int = self._agent.prepXferDlist(agent, segment, runs, [])
        return handle


class NixlMover(Pump[_Remote, int]):
    def __init__(
        self,
        me: Peer,
        region: Region,
        on_stopped: OnStopped,
        network: Network,
        fail_share: float = 0.0,
    ) -> None:
        """`fail_share`: of the copies that are made to fail, for testing. ConfigError: UCX is not to be confined."""
        lane = NixlLane(f"{me.worker_id}-{me.incarnation:016x}", region, network)
        if len(lane.metadata) == 0:
            raise InvariantError("NIXL describes itself with nothing")
        self._description = region.describe(lane.metadata)
        faulty = FaultyLane(lane, fail_share, me.worker_id) if fail_share else lane
        super().__init__("nixl", faulty, region, on_stopped)

    def describe(self) -> bytes:
        """Return what another process's NIXL needs to write here."""
        return self._description


def _agent_config() -> nixl.nixlAgentConfig:
    config = nixl.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = PROGRESS_PAUSE_US
    config.useListenThread = False
    config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    return config


def _memory_of(owner: Region | Description) -> tuple[nixl.nixl_mem_t, int]:
    """Return which memory NIXL is to take pages for, and of which device."""
    return (nixl.DRAM_SEG, 0) if owner.gpu is None else (nixl.VRAM_SEG, owner.gpu)


def _words(error: Exception) -> str:
    return f"{type(error).__name__.removeprefix('nixl')}: {error}"
