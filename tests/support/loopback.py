"""A backend that copies within one process: the reference with which the others are compared."""

import secrets

from pdserve.base.ids import Peer
from pdserve.kvtransfer.backends.backend import Indices, PostError
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Description, Region

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

    def connect(self, description: Description, source: Region) -> "LoopbackConnection":
        if description.metadata not in _regions:
            raise PostError("no such region in this process")
        return LoopbackConnection(source, description.metadata)

    def cut(self, peer: Peer) -> None:
        pass

    def close(self, *, in_flight: bool) -> None:
        del _regions[self.metadata]


class LoopbackConnection:
    def __init__(self, source: Region, target: bytes) -> None:
        self._source = source
        self._target = target

    def post(self, src: Indices, dst: Indices) -> None:
        region = _regions.get(self._target)
        if region is None:
            raise PostError("the region is gone")
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            _row(region, target)[:] = _row(self._source, source)

    def close(self) -> None:
        pass


def _row(region: Region, index: int) -> object:
    return region.view[index] if index < region.num_pages else region.probe[index - region.num_pages]


def loopback_mover(region: Region, on_stopped: OnStopped) -> Mover:
    return Mover(LoopbackBackend(region), on_stopped)
