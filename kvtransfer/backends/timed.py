"""For measuring: a lane that adds up how long posting takes."""

from time import perf_counter, thread_time
from typing import Generic

from pdserve.kvtransfer.backends.lane import Indices, Lane, RemoteT, SliceT
from pdserve.kvtransfer.mover import Description


class TimedLane(Generic[RemoteT, SliceT]):
    """Passes everything on. Read its sums while nothing is being copied."""

    def __init__(self, lane: Lane[RemoteT, SliceT]) -> None:
        self._lane = lane
        self.carrier = lane.carrier
        self.clock_s = 0.0  # in `post`
        self.cpu_s = 0.0

    def reset(self) -> None:
        self.clock_s = self.cpu_s = 0.0

    def open(self, description: Description) -> RemoteT:
        return self._lane.open(description)

    def shut(self, remote: RemoteT) -> None:
        self._lane.shut(remote)

    def post(self, remote: RemoteT, src: Indices, dst: Indices) -> SliceT | None:
        clock_s, cpu_s = perf_counter(), thread_time()
        try:
            return self._lane.post(remote, src, dst)
        finally:
            self.clock_s += perf_counter() - clock_s
            self.cpu_s += thread_time() - cpu_s

    def landed(self, posted: SliceT) -> bool:
        return self._lane.landed(posted)

    def close(self) -> None:
        self._lane.close()
