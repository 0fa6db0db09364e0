"""What a library does for the thread that drives copies."""

from typing import Protocol, TypeVar

import numpy as np

from pdserve.kvtransfer.mover import Description

Indices = np.ndarray[tuple[int], np.dtype[np.int32]]
RemoteT = TypeVar("RemoteT")
SliceT = TypeVar("SliceT")


class LaneError(Exception):
    """A slice has ended without landing, or could not be posted: nothing of it is under way."""


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
        """Start to write pages; None if they have landed already."""
        ...

    def landed(self, posted: SliceT) -> bool:
        """Return whether a slice has landed. After True, or a LaneError, it is gone."""
        ...

    def close(self) -> None: ...
