"""What a library does for the thread that drives copies."""

from typing import Protocol, TypeVar

import numpy as np

from pdserve.kvtransfer.mover import Description

Indices = np.ndarray[tuple[int], np.dtype[np.int32]]
RemoteT = TypeVar("RemoteT")
SliceT = TypeVar("SliceT")


class LaneError(Exception):
    """A slice could not be posted: nothing of it is, or was, under way."""


class SliceLostError(LaneError):
    """A posted slice has ended without landing: what the lane had taken of it may still be written."""


class Lane(Protocol[RemoteT, SliceT]):
    """A way into other processes' memory, used by one thread alone. Indices past the last page are probe memory's."""

    @property
    def carrier(self) -> str:
        """Return what carries the bytes; empty where the library does not say."""
        ...

    def open(self, description: Description) -> RemoteT:
        """Prepare writes to a peer's region; LaneError if it cannot be reached this way."""
        ...

    def shut(self, remote: RemoteT) -> None:
        """Undo `open`; what is in flight ends soon if the peer's process has ended."""
        ...

    def post(self, remote: RemoteT, src: Indices, dst: Indices) -> SliceT | None:
        """Start to write pages; None if they have landed already. SliceLostError: some may be on their way."""
        ...

    def landed(self, posted: SliceT) -> bool:
        """Return whether a slice has landed. After True, or a SliceLostError, it is gone."""
        ...

    def close(self) -> None: ...
