"""Copies within one process: the reference that other movers are compared with, and the simulator's."""

import secrets
import threading
from typing import NewType

from pdserve.kvtransfer.backends.lane import Indices, LaneError
from pdserve.kvtransfer.backends.pump import Pump
from pdserve.kvtransfer.mover import Description, OnStopped, Region

_TOKEN_BYTES = 16
_Token = NewType("_Token", bytes)

_regions: dict[_Token, Region] = {}  # of every loopback mover in this process
_lock = threading.Lock()


class _LoopbackLane:
    carrier = "memory"

    def __init__(self, region: Region) -> None:
        self._region = region
        self.token = _Token(secrets.token_bytes(_TOKEN_BYTES))
        with _lock:
            _regions[self.token] = region

    def open(self, description: Description) -> _Token:
        token = _Token(description.lane)
        if token not in _regions:
            raise LaneError("no such region in this process")
        return token

    def shut(self, remote: _Token) -> None:
        pass

    def post(self, remote: _Token, src: Indices, dst: Indices) -> None:
        region = _regions.get(remote)
        if region is None:
            raise LaneError("the region is gone")
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            region.row(target)[:] = self._region.row(source)

    def landed(self, posted: None) -> bool:
        raise LaneError("nothing is ever in flight")

    def close(self) -> None:
        with _lock:
            del _regions[self.token]


class LoopbackMover(Pump[_Token, None]):
    def __init__(self, region: Region, on_stopped: OnStopped) -> None:
        lane = _LoopbackLane(region)
        self._description = region.describe(lane.token)
        super().__init__("loopback", lane, region, on_stopped)

    def describe(self) -> bytes:
        """Return what a mover of this process needs to write here."""
        return self._description
