"""What a library that moves bytes does for a mover. A new library is a new file beside this one.

One thread calls all of it, except `cut`. Page indices past the last page are those of probe memory.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdserve.base.ids import Peer
from pdserve.kvtransfer.region import Description, Region
from pdserve.kvtransfer.routes import Route, Rows

Indices = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Way:
    """Memory of a peer, and which part of each page goes there."""

    there: Description
    route: Route | None = None  # None: whole pages


class PostError(Exception):
    """A slice could not be posted: nothing of it is, or was, under way."""


class TransferLostError(PostError):
    """A posted slice has ended without landing: what the library had taken of it may still be written."""


class Transfer(Protocol):
    """A posted slice on its way."""

    def has_landed(self) -> bool:
        """Look whether it has landed. After True, or a PostError, it has ended and must not be asked again.

        Any other PostError than a TransferLostError: a part could not be posted, and nothing more will be written.
        """
        ...


class Connection(Protocol):
    """A way into one peer's region."""

    def post(self, src: Indices, dst: Indices) -> Transfer | None:
        """Start to write pages; None if they have landed already. TransferLostError: some may be on their way."""
        ...

    def close(self) -> None:
        """Undo `connect`. Transfers in flight end soon if the peer's process has ended."""
        ...


class Backend(Protocol):
    """A library, and this process's region registered with it."""

    @property
    def name(self) -> str: ...

    @property
    def carrier(self) -> str:
        """What carries the bytes; empty where the library does not say."""
        ...

    @property
    def region(self) -> Region: ...

    @property
    def metadata(self) -> bytes:
        """What the same library in another process needs to write here."""
        ...

    def begin(self) -> None:
        """Prepare the thread that calls all of it from now on."""
        ...

    def progress(self) -> float | None:
        """Let what others write here advance; return in how many seconds again. None: it advances by itself."""
        ...

    def connect(self, way: Way, source: Region) -> Connection:
        """Prepare writes to a peer's region; PostError if it cannot be reached.

        source: what is written, the backend's own region or another one with pages of the peer's size. That one stays
        where it is until the backend is closed.
        """
        ...

    def cut(self, peer: Peer) -> None:
        """Let nothing that the library has read of an ended process reach a page any more.

        Called from any thread. Blocks while bytes of that process are copied into pages.
        """
        ...

    def close(self, *, in_flight: bool) -> None:
        """Stop. `in_flight`: some transfers have not ended, and what they use must stay until the process ends."""
        ...


def row_indices(pages: Indices, rows: Rows) -> Indices:
    """Return which rows a route names by pages. Probe memory has rows as pages have, and they follow those of pages."""
    firsts = pages * np.int32(rows.per_page) + np.int32(rows.first)
    indices: Indices = np.add.outer(firsts, np.arange(rows.count, dtype=np.int32)).reshape(-1)
    return indices
