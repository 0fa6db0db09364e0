"""What moves pages between workers' memories, whichever library does it.

A mover's owner keeps the source pages unchanged until the copy is reported stopped. The time a copy takes never makes
it reported: only its end does, or the end of the process it writes to.
"""

import struct
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NewType, Protocol

import numpy as np

from pdserve.errors import ProtocolError
from pdserve.kvlayout import PageDigest
from pdserve.kvtransfer.digest import ByteRows, Digests, host_digests
from pdserve.kvtransfer.session import HandoffKey, Pages, Peer

CopyId = NewType("CopyId", int)
Rows = Any  # uint8 [rows, page_bytes]: numpy's, or torch's where they lie in a GPU's memory

_MAGIC = b"PDKV"
_VERSION = 1
# Magic, version, GPU (-1: the host), address, num_pages, page_bytes, address and pages of the probe, bytes of the lane.
_HEADER = struct.Struct("!4sHiQQQQQI")
_HOST = -1
MAX_DESCRIPTION_BYTES = 1 << 20
PROBE_BYTES = 4 << 20  # or one page, if that is more
MAX_PROBE_PAGES = 1 << 20
MAX_REGION_PAGES = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The KV pages of this process: one contiguous run of memory, page i is row i of `view`.

    `probe` is as much again as is needed to measure a way here: rows of the same size that never hold KV.
    """

    view: Rows
    probe: Rows
    address: int
    probe_address: int
    digests: Digests
    gpu: int | None = None  # whose memory it is; None: the host's

    @classmethod
    def of(cls, view: ByteRows, digest: PageDigest = "xxh3") -> "Region":
        """Return the region that a contiguous [num_pages, page_bytes] array is."""
        if not view.flags.c_contiguous:
            raise ValueError("view: pages do not follow one another")
        probe = np.zeros((num_probe_rows(view.shape[1]), view.shape[1]), np.uint8)
        return cls(view, probe, view.ctypes.data, probe.ctypes.data, host_digests(digest, view))

    @property
    def num_pages(self) -> int:
        return len(self.view)

    @property
    def page_bytes(self) -> int:
        return int(self.view.shape[1])

    def row(self, index: int) -> Rows:
        """Return a page, or past the last one a row of the probe memory."""
        return self.view[index] if index < self.num_pages else self.probe[index - self.num_pages]

    def first_mismatch(self, pages: Pages, digests: tuple[int, ...]) -> int | None:
        """Return the position of the first page whose digest differs, or None."""
        found = zip(self.digests(pages), digests, strict=True)
        return next((position for position, (mine, theirs) in enumerate(found) if mine != theirs), None)

    def describe(self, lane: bytes) -> bytes:
        """Return what another process's mover needs to write here; `lane` is for its lane."""
        pages = (self.address, self.num_pages, self.page_bytes)
        return Description(*pages, self.probe_address, len(self.probe), lane, self.gpu).encode()


def num_probe_rows(page_bytes: int) -> int:
    """Return how many rows of probe memory a region has beside its pages."""
    return max(1, PROBE_BYTES // page_bytes)


class ProbeError(Exception):
    """A pair could not be measured. Its copies go on as if nothing had been asked."""


@dataclass(frozen=True, slots=True)
class PairSpeed:
    """How fast one process's memory reaches another's, measured while nothing else was copied."""

    bytes_per_s: float
    page_s: float  # for one page by itself
    carrier: str  # "memory", "tcp", "not tcp": as far as it can be known


@dataclass(frozen=True, slots=True)
class CopyStopped:
    """A copy is over: landed (with a digest for each page), or failed (None). It reads no page any more."""

    copy_id: CopyId
    digests: tuple[int, ...] | None
    reason: str = ""
    in_doubt: bool = False  # failed, and bytes that were on their way may still be written into the peer's pages


OnStopped = Callable[[CopyStopped], None]


class Mover(Protocol):
    """Writes pages of this process's region into those of others.

    Copies of one hand-off are reported stopped in the order they were written; a hand-off with few pages left overtakes
    others to the same peer. Reports come from the mover's own thread.
    """

    @property
    def name(self) -> str:
        """Which library it is; both ends must use the same."""
        ...

    def describe(self) -> bytes:
        """Return what another process needs to write here; opaque to all but movers of the same name."""
        ...

    def attach(self, peer: Peer, description: bytes) -> None:
        """Prepare writes to a peer; blocks. ProtocolError if its description cannot be used.

        A peer to which a copy has failed is opened anew by the next one, or by attaching it again, once no copy to it
        is outstanding.
        """
        ...

    def write(self, peer: Peer, handoff: HandoffKey, src: Pages, dst: Pages) -> CopyId:
        """Start to copy own pages `src` into the peer's pages `dst`. Never blocks; CopyStopped follows."""
        ...

    def cancel(self, peer: Peer, handoff: HandoffKey) -> None:
        """Copy nothing more of a hand-off. Never blocks.

        Each of its copies is reported all the same, once what the library has taken of it has ended.
        """
        ...

    def probe(self, peer: Peer) -> Future[PairSpeed]:
        """Measure how fast a peer is reached, whenever no copy is under way. Never blocks; ProbeError if it fails."""
        ...

    @property
    def num_stalled(self) -> int:
        """Return to how many peers bytes are in flight and hardly move."""
        ...

    @property
    def turn(self) -> int | None:
        """Return a number that changes whenever the mover's thread comes round; None while it has nothing to do."""
        ...

    def forget(self, peer: Peer) -> None:
        """Report every outstanding copy to a peer as failed: its process is known to have ended."""
        ...

    def cut(self, peer: Peer) -> None:
        """Let nothing that this process has read of a peer's reach a page any more: the peer's process has ended.

        Blocks while bytes of it are copied into pages.
        """
        ...

    def close(self) -> None:
        """Stop; blocks. Outstanding copies are not reported."""
        ...


@dataclass(frozen=True, slots=True)
class Description:
    """A peer's region, and what its mover's lane needs to reach it."""

    address: int
    num_pages: int
    page_bytes: int
    probe_address: int
    num_probe_pages: int
    lane: bytes
    gpu: int | None = None  # whose memory it is; None: the host's

    def encode(self) -> bytes:
        fields = (self.address, self.num_pages, self.page_bytes, self.probe_address, self.num_probe_pages)
        gpu = _HOST if self.gpu is None else self.gpu
        return _HEADER.pack(_MAGIC, _VERSION, gpu, *fields, len(self.lane)) + self.lane

    @classmethod
    def decode(cls, data: bytes) -> "Description":
        """Return what a peer described; ProtocolError says what is wrong with it."""
        if not _HEADER.size <= len(data) <= MAX_DESCRIPTION_BYTES:
            raise ProtocolError(f"mover_metadata: {len(data)} bytes")
        magic, version, gpu, address, num_pages, page_bytes, *probe, lane_bytes = _HEADER.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ProtocolError(f"mover_metadata: version {version} of {magic!r}, {_VERSION} of {_MAGIC!r} is known")
        if len(data) != _HEADER.size + lane_bytes:
            raise ProtocolError(f"mover_metadata: {len(data)} bytes, its header says {_HEADER.size + lane_bytes}")
        if not 1 <= num_pages <= MAX_REGION_PAGES or page_bytes < 1 or address + num_pages * page_bytes > 1 << 64:
            raise ProtocolError(f"mover_metadata: {num_pages} pages of {page_bytes} bytes at {address:#x}")
        if not 1 <= probe[1] <= MAX_PROBE_PAGES or probe[0] + probe[1] * page_bytes > 1 << 64:
            raise ProtocolError(f"mover_metadata: {probe[1]} pages to probe at {probe[0]:#x}")
        if gpu < _HOST:
            raise ProtocolError(f"mover_metadata: GPU {gpu}")
        lane = data[_HEADER.size :]
        return cls(address, num_pages, page_bytes, probe[0], probe[1], lane, None if gpu == _HOST else gpu)
