"""The KV pages of a process: where they lie, what their digests are, and how another process learns of them.

Digests are 64 bits a page. They find torn and foreign pages, not forgeries. Both ends of a hand-off take the same kind:
it is part of what their layouts must agree on. `xxh3` is the fastest on a CPU; `splitmix64` is what a GPU computes in
place (`kernels.pageio.page_digests`). `xxh3_runs` and `splitmix64_runs` are sums over a page whose KV heads follow one
another, so that ranks with memory of their own add theirs, however they divide pages.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import xxhash

from pdserve.base.errors import ProtocolError
from pdserve.kvtransfer.routes import Share
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

_RANKS_MAGIC = b"PDKR"
_RANKS_VERSION = 3  # in which order pages lie in a rank's memory: `[kv_head][layer][k|v]`
_RANKS = struct.Struct("!4sHH")  # magic, version, number of ranks
# Layers and heads of a rank's share, which copy of them it is, and of how many; bytes of its description.
_RANK = struct.Struct("!IIIIIII")
MAX_RANKS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The KV pages of this process: one contiguous run of memory, page i is row i of `view`.

    `probe` is memory beside the pages that never holds KV: rows of the same size, for measuring the way here.
    """

    view: Rows
    probe: Rows
    address: int
    probe_address: int
    digests: TakeDigests  # of all that lies here
    gpu: int | None = None  # whose memory it is; None: the host's
    share: Share | None = None  # of each page that lies here; None: all of it
    of_sent: TakeDigests | None = None  # digests of what it sends; None: all of it

    @classmethod
    def of(cls, view: ByteRows) -> "Region":
        """Return the region that a contiguous [num_pages, page_bytes] array is."""
        if not view.flags.c_contiguous:
            raise ValueError("view: pages do not follow one another")
        probe = np.zeros((num_probe_rows(view.shape[1]), view.shape[1]), np.uint8)
        return cls(view, probe, view.ctypes.data, probe.ctypes.data, partial(_xxh3, view))

    @classmethod
    def of_rank(cls, view: ByteRows, share: Share, whole: Share) -> "Region":
        """Return the region of a rank with memory of its own, which holds its share of each whole page."""
        numbers = share.run_numbers(whole)
        sent = frozenset(share.sent.run_numbers(whole))
        places = [place for place, number in enumerate(numbers) if number in sent]
        digests, of_sent = (partial(_xxh3_runs, view, numbers, each) for each in (range(len(numbers)), places))
        return replace(cls.of(view), digests=digests, share=share, of_sent=of_sent)

    @property
    def num_pages(self) -> int:
        return len(self.view)

    @property
    def page_bytes(self) -> int:
        return int(self.view.shape[1])

    def digests_of_sent(self, pages: Pages) -> tuple[int, ...]:
        """Return digests of what this process sends of pages: of all that lies here, unless others have it, too."""
        return (self.of_sent or self.digests)(pages)

    def first_mismatch(self, pages: Pages, digests: tuple[int, ...]) -> int | None:
        """Return the position of the first page whose digest differs, or None."""
        return first_difference(self.digests(pages), digests)

    def described(self, metadata: bytes) -> bytes:
        """Return what another process needs to know of it, with its share where it is a rank's."""
        description = self.description(metadata)
        return description.encode() if self.share is None else encode_ranks([(self.share, description)])

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


def encode_ranks(ranks: Sequence[tuple[Share, Description]]) -> bytes:
    """Return what another process needs to write to ranks with memory of their own."""
    parts = [_RANKS.pack(_RANKS_MAGIC, _RANKS_VERSION, len(ranks))]
    for share, description in ranks:
        encoded = description.encode()
        parts += (_RANK.pack(*share.layers, *share.heads, share.copy, share.num_copies, len(encoded)), encoded)
    return b"".join(parts)


def decode_ranks(data: bytes) -> tuple[tuple[Share, Description], ...]:
    """Return what a peer described; ProtocolError says what is wrong with it."""
    if not _RANKS.size <= len(data) <= MAX_DESCRIPTION_BYTES:
        raise ProtocolError(f"mover_metadata: {len(data)} bytes")
    magic, version, count = _RANKS.unpack_from(data)
    if (magic, version) != (_RANKS_MAGIC, _RANKS_VERSION) or not 1 <= count <= MAX_RANKS:
        raise ProtocolError(f"mover_metadata: version {version} of {magic!r}, with {count} ranks")
    ranks, place = list[tuple[Share, Description]](), _RANKS.size
    for _ in range(count):
        if len(data) < place + _RANK.size:
            raise ProtocolError(f"mover_metadata: {len(data)} bytes for {count} ranks")
        *spans, num_bytes = _RANK.unpack_from(data, place)
        place += _RANK.size
        share = Share((spans[0], spans[1]), (spans[2], spans[3]), *spans[4:])
        ranks.append((share, Description.decode(data[place : place + num_bytes])))
        place += num_bytes
    if place != len(data):
        raise ProtocolError(f"mover_metadata: {len(data)} bytes, its ranks take {place}")
    if len({description.num_pages for _, description in ranks}) > 1:
        raise ProtocolError("mover_metadata: its ranks differ in their number of pages")
    return tuple(ranks)


def first_difference(found: Sequence[int], digests: Sequence[int]) -> int | None:
    """Return the position of the first of these digests that differ, or None."""
    pairs = enumerate(zip(found, digests, strict=True))
    return next((position for position, (mine, theirs) in pairs if mine != theirs), None)


def num_probe_rows(page_bytes: int) -> int:
    return max(1, PROBE_BYTES // page_bytes)


def _xxh3(view: ByteRows, pages: Pages) -> tuple[int, ...]:
    """XXH3, seed 0. Other threads run meanwhile."""
    return tuple(xxhash.xxh3_64_intdigest(view[page]) for page in pages)


def _xxh3_runs(view: ByteRows, numbers: Sequence[int], places: Sequence[int], pages: Pages) -> tuple[int, ...]:
    """Return of each page the sum of XXH3 over the runs at some places, each with its number in a whole page as seed.

    numbers: of all runs that lie here.
    """
    seeds, runs = [numbers[place] for place in places], view.reshape(len(view), len(numbers), -1)
    found = (map(xxhash.xxh3_64_intdigest, map(runs[page].__getitem__, places), seeds) for page in pages)
    return tuple([sum(page) % (1 << 64) for page in found])
