"""Rows of a region as gloo takes them: in memory of the host.

A GPU's rows are copied through pinned memory, on a stream of their own: a copy waits for no step, and no step waits for
it. Whoever asks for a copy keeps steps away from the rows until it is over. Rows past the last page are probe memory's.

Invariant: a copy is over when the call that makes it returns.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

STAGE_BYTES = 4 << 20  # received at a time; or one row, if that is more

Rows = Sequence[int]


class HostRows:
    """Copies rows to and from memory of the host, or hands them out where they lie. For any thread."""

    def __init__(self, pages: Tensor, probe: Tensor, *, staged: bool = True) -> None:
        """pages and probe: uint8 [rows, row_bytes]. `staged`: rows pass through other memory of the host."""
        self._pages, self._probe = pages, probe
        self._staged = staged
        self._stream = torch.cuda.Stream(pages.device) if pages.device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._pages) + len(self._probe)

    def read(self, rows: Rows) -> Sequence[Tensor]:
        """Return what rows hold, a tensor for each; blocks. Unstaged, these are the rows themselves."""
        if not self._staged:
            return self._in_place(rows)
        staged = self._new_stage(len(rows))
        with torch.cuda.stream(self._stream):
            for row, memory in zip(self._in_place(rows), staged, strict=True):
                memory.copy_(row, non_blocking=True)
        self._finish()
        return list(staged)

    def parts(self, rows: Rows) -> Iterator[tuple[Rows, Sequence[Tensor]]]:
        """Yield rows in parts, each with memory to receive it into; `write` it before the next part is asked for."""
        if not self._staged:
            yield rows, self._in_place(rows)
            return
        stage = self._new_stage(max(1, min(len(rows), STAGE_BYTES // self._pages.shape[1])))
        for first in range(0, len(rows), len(stage)):
            part = rows[first : first + len(stage)]
            yield part, list(stage[: len(part)])

    def write(self, rows: Rows, received: Sequence[Tensor]) -> None:
        """Have rows hold what was received for them; blocks."""
        if not self._staged:
            return
        with torch.cuda.stream(self._stream):
            for row, memory in zip(self._in_place(rows), received, strict=True):
                row.copy_(memory, non_blocking=True)
        self._finish()

    def _in_place(self, rows: Rows) -> list[Tensor]:
        num_pages = len(self._pages)
        return [self._pages[row] if row < num_pages else self._probe[row - num_pages] for row in rows]

    def _new_stage(self, num_rows: int) -> Tensor:
        """Return [num_rows, row_bytes] of host memory. Pinned memory is kept, and given out again, by torch."""
        return torch.empty((num_rows, self._pages.shape[1]), dtype=torch.uint8, pin_memory=self._stream is not None)

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
