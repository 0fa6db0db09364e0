"""Memory of the host that rows of a region pass through, for a library that takes no other.

A copy runs on a stream of its own: it waits for no step, and no step waits for it. Whoever asks for one keeps steps
away from the rows until it is over. Rows past the last page are probe memory's.

Invariant: a copy is over when the call that makes it returns; nothing is put into rows once their entry has been cut.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

STAGE_BYTES = 4 << 20  # received of one writer at a time; or one row, if that is more

Rows = Sequence[int]


class Paged(Protocol):
    """What is known of a region here."""

    @property
    def gpu(self) -> int | None:
        """Return whose memory it is; None: the host's."""
        ...

    @property
    def page_bytes(self) -> int: ...

    def row(self, index: int) -> object:
        """Return a row, numpy's or torch's, where it lies."""
        ...


class Staging:
    """Copies rows of a region to and from memory of the host. For any thread."""

    def __init__(self, region: Paged) -> None:
        self._region = region
        self._stream = None if region.gpu is None else torch.cuda.Stream(region.gpu)

    def room(self, num_rows: int) -> Tensor:
        """Return memory for so many rows, [num_rows, row_bytes]. A GPU's is pinned: such memory is kept, and given out
        again, by torch."""
        shape = num_rows, self._region.page_bytes
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._stream is not None)

    def take_out(self, rows: Rows) -> Tensor:
        """Return what rows hold, [len(rows), row_bytes] in memory of the host; blocks."""
        host = self.room(len(rows))
        with torch.cuda.stream(self._stream):
            for row, staged in zip(rows, host, strict=True):
                staged.copy_(row_of(self._region, row), non_blocking=True)
        self._finish()
        return host

    def put_in(self, rows: Rows, host: Tensor) -> None:
        """Have rows hold what is in memory of the host, [len(rows), row_bytes]; blocks."""
        with torch.cuda.stream(self._stream):
            for row, staged in zip(rows, host, strict=True):
                row_of(self._region, row).copy_(staged, non_blocking=True)
        self._finish()

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some of the rows that a writer names, and the memory that they are received into, a tensor for each."""

    rows: Rows
    memory: Sequence[Tensor]


class Entry:
    """One writer's way into a region's rows. Used by one thread; any may cut it."""

    def __init__(self, region: Paged, staging: Staging | None) -> None:
        """Without `staging` rows are received where they lie."""
        self._region = region
        self._staging = staging
        self._stage: Tensor | None = None  # the same for all its parts
        self._lock = threading.Lock()
        self._is_cut = False

    def parts(self, rows: Rows) -> Iterator[Part]:
        """Yield rows as there is room for them. Each part is to be put in its place before the next is asked for."""
        if self._staging is None:
            yield Part(rows, [row_of(self._region, row) for row in rows])
            return
        if self._stage is None:
            self._stage = self._staging.room(max(1, STAGE_BYTES // self._region.page_bytes))
        for first in range(0, len(rows), len(self._stage)):
            some = rows[first : first + len(self._stage)]
            yield Part(some, list(self._stage[: len(some)]))

    def put(self, part: Part) -> None:
        """Have what was received reach its rows; blocks. OSError, and nothing reaches them, after the cut."""
        with self._lock:
            if self._is_cut:
                raise OSError("it was cut off")
            if self._staging is not None and self._stage is not None:
                self._staging.put_in(part.rows, self._stage[: len(part.rows)])

    def cut(self) -> None:
        """Put nothing into rows any more; blocks while a copy is under way. Rows that lie in the host's memory are
        written as their bytes are read from the network, past this."""
        with self._lock:
            self._is_cut = True


def row_of(region: Paged, index: int) -> Tensor:
    """Return a row where it lies."""
    return torch.as_tensor(region.row(index))
