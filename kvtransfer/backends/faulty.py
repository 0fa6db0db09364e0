"""For testing alone: a lane some of whose copies fail, the same ones each time."""

import random
from typing import Generic

from pdserve.kvtransfer.backends.lane import Indices, Lane, LaneError, RemoteT, SliceT
from pdserve.kvtransfer.mover import Description


class FaultyLane(Generic[RemoteT, SliceT]):
    """Refuses a share of the slices before anything of them is under way."""

    def __init__(self, lane: Lane[RemoteT, SliceT], share: float, seed: str) -> None:
        self._lane = lane
        self._share = share
        self._rng = random.Random(seed)
        self.carrier = lane.carrier

    def open(self, description: Description) -> RemoteT:
        return self._lane.open(description)

    def shut(self, remote: RemoteT) -> None:
        self._lane.shut(remote)

    def post(self, remote: RemoteT, src: Indices, dst: Indices) -> SliceT | None:
        if self._rng.random() < self._share:
            raise LaneError("made to fail, for testing")
        return self._lane.post(remote, src, dst)

    def landed(self, posted: SliceT) -> bool:
        return self._lane.landed(posted)

    def close(self) -> None:
        self._lane.close()
