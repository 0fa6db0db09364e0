"""The KV pages of a process: where they lie, what their digests are, and how another process learns of them.

Digests are 64 bits a page. They find torn and foreign pages, not forgeries. Both ends of a hand-off take the same kind:
it is part of what their layouts must agree on. `xxh3` is the fastest on a CPU; `splitmix64` is what a GPU computes in
place (`kernels.pageio.page_digests`).
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash

from pdserve.base.errors import ProtocolError
from pdserve.protocol.page_tables import Pages

ByteRows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
Rows = Any  # uint8 [rows, page_bytes]: numpy's, or torch's where they lie in a GPU's memory
TakeDigests = Callable[[Pages], tuple[int, ...]]  # of pages of one region, in their order; for any thread

MAX_DESCRIPTION_BYTES = 1 << 20
MAX_REGION_PAGES = 1 << 24
PROBE_BYTES = 4 << 20  # or one page, if that is more
MAX_PROBE_PAGES = 1 << 20

_MAGIC = b"PDKV"
_VERSION = 1
# Magic, version, GPU (-1: the host), address, num_pages, page_bytes, address and pages of the probe memory, bytes of
# the backend's metadata.
_HEADER = struct.Struct("!4sHiQQQQQI")
_HOST = -1


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The KV pages of this process: one contiguous run of memory, page i is row i of `view`.

    `probe` is memory beside the pages that never holds KV: rows of the same size, for measuring the way here.
    """

    view: Rows
    probe: Rows
    address: int
    probe_address: int
    digests: TakeDigests
    gpu: int | None = None  # whose memory it is; None: the host's

    @classmethod
    def of(cls, view: ByteRows) -> "Region":
        """Return the region that a contiguous [num_pages, page_bytes] array is."""
        if not view.flags.c_contiguous:
            raise ValueError("view: pages do not follow one another")
        probe = np.zeros((num_probe_rows(view.shape[1]), view.shape[1]), np.uint8)
        return cls(view, probe, view.ctypes.data, probe.ctypes.data, partial(_xxh3, view))

    @property
    def num_pages(self) -> int:
        return len(self.view)

    @property
    def page_bytes(self) -> int:
        return int(self.view.shape[1])

    def first_mismatch(self, pages: Pages, digests: tuple[int, ...]) -> int | None:
        """Return the position of the first page whose digest differs, or None."""
        found = zip(self.digests(pages), digests, strict=True)
        return next((position for position, (mine, theirs) in enumerate(found) if mine != theirs), None)

    def description(self, metadata: bytes = b"") -> "Description":
        pages = (self.address, self.num_pages, self.page_bytes)
        return Description(*pages, self.probe_address, len(self.probe), metadata, self.gpu)


@dataclass(frozen=True, slots=True)
class Description:
    """A region as another process knows it, and what a backend needs to reach it."""

    address: int
    num_pages: int
    page_bytes: int
    probe_address: int
    num_probe_pages: int
    metadata: bytes
    gpu: int | None = None  # whose memory it is; None: the host's

    def encode(self) -> bytes:
        fields = (self.address, self.num_pages, self.page_bytes, self.probe_address, self.num_probe_pages)
        gpu = _HOST if self.gpu is None else self.gpu
        return _HEADER.pack(_MAGIC, _VERSION, gpu, *fields, len(self.metadata)) + self.metadata

    @classmethod
    def decode(cls, data: bytes) -> "Description":
        """Return what a peer described; ProtocolError says what is wrong with it."""
        if not _HEADER.size <= len(data) <= MAX_DESCRIPTION_BYTES:
            raise ProtocolError(f"mover_metadata: {len(data)} bytes")
        magic, version, gpu, address, num_pages, page_bytes, *probe, num_bytes = _HEADER.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ProtocolError(f"mover_metadata: version {version} of {magic!r}, {_VERSION} of {_MAGIC!r} is known")
        if len(data) != _HEADER.size + num_bytes:
            raise ProtocolError(f"mover_metadata: {len(data)} bytes, its header says {_HEADER.size + num_bytes}")
        if not 1 <= num_pages <= MAX_REGION_PAGES or page_bytes < 1 or address + num_pages * page_bytes > 1 << 64:
            raise ProtocolError(f"mover_metadata: {num_pages} pages of {page_bytes} bytes at {address:#x}")
        if not 1 <= probe[1] <= MAX_PROBE_PAGES or probe[0] + probe[1] * page_bytes > 1 << 64:
            raise ProtocolError(f"mover_metadata: {probe[1]} pages to probe at {probe[0]:#x}")
        if gpu < _HOST:
            raise ProtocolError(f"mover_metadata: GPU {gpu}")
        metadata = data[_HEADER.size :]
        return cls(address, num_pages, page_bytes, probe[0], probe[1], metadata, None if gpu == _HOST else gpu)


def num_probe_rows(page_bytes: int) -> int:
    return max(1, PROBE_BYTES // page_bytes)


def _xxh3(view: ByteRows, pages: Pages) -> tuple[int, ...]:
    """XXH3, seed 0. Other threads run meanwhile."""
    return tuple(xxhash.xxh3_64_intdigest(view[page]) for page in pages)
