"""A backend that copies within one process: the reference with which the others are compared."""

import secrets

import numpy as np

from pdserve.base.ids import Peer
from pdserve.kvtransfer.backends.backend import Indices, PostError, Way, row_indices
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.routes import Rows

ByteRow = np.ndarray[tuple[int], np.dtype[np.uint8]]

_regions: dict[bytes, Region] = {}  # of every loopback backend in this process, by its metadata


class LoopbackBackend:
    name = "loopback"
    carrier = "memory"

    def __init__(self, region: Region) -> None:
        self.region = region
        self.metadata = secrets.token_bytes(16)
        _regions[self.metadata] = region

    def begin(self) -> None:
        pass

    def progress(self) -> None:
        pass

    def connect(self, way: Way, source: Region) -> "LoopbackConnection":
        if way.there.metadata not in _regions:
            raise PostError("no such region in this process")
        return LoopbackConnection(source, way)

    def cut(self, peer: Peer) -> None:
        pass

    def close(self, *, in_flight: bool) -> None:
        del _regions[self.metadata]


class LoopbackConnection:
    def __init__(self, source: Region, way: Way) -> None:
        self._source = source
        self._way = way

    def post(self, src: Indices, dst: Indices) -> None:
        region = _regions.get(self._way.there.metadata)
        if region is None:
            raise PostError("the region is gone")
        if (route := self._way.route) is not None:
            ends = (self._source, src, route.source), (region, dst, route.target)
            (source_rows, target_rows) = (rows_of(*end) for end in ends)
            for source_row, target_row in zip(source_rows, target_rows, strict=True):
                target_row[:] = source_row
            return
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            _row(region, target)[:] = _row(self._source, source)

    def close(self) -> None:
        pass


def _row(region: Region, index: int) -> object:
    return region.view[index] if index < region.num_pages else region.probe[index - region.num_pages]


def rows_of(region: Region, pages: Indices, rows: Rows) -> list[ByteRow]:
    """Return the rows that a route names by these pages."""
    memory = region.view
    if pages[0] >= region.num_pages:
        memory, pages = region.probe, pages - region.num_pages
    memory = memory.reshape(-1)
    firsts = [rows.offset + index * rows.stride for index in row_indices(pages, rows).tolist()]
    return [memory[first : first + rows.length] for first in firsts]


def loopback_mover(region: Region, on_stopped: OnStopped) -> Mover:
    return Mover(LoopbackBackend(region), on_stopped)
