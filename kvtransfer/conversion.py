"""Pages for a receiver whose K and V have another type: the sender converts them into memory of its own, and copies
them from there. Nothing is converted in place: the sender goes on with its own pages.

Invariant: a row that is sent has the bytes that `KvRows` of the receiver's type makes of the sender's row: those that
the receiver would have written of the same values. Digests are those of these bytes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.base.ids import PageId
from pdserve.kernels.kv_rows import KvRows
from pdserve.kvtransfer.region import Region, Rows
from pdserve.protocol.kvlayout import KvLayout, coded_as
from pdserve.protocol.page_tables import Pages

# Values. Of no more, torch computes in one thread. Its threads would wait for each other on processors that others use.
MOST_AT_ONCE = 16384


@dataclass(frozen=True, slots=True)
class Conversion:
    """From rows of one type to rows of another, in pages that are alike but for that."""

    source: KvRows
    target: KvRows
    page_bytes: int  # of the receiver's pages

    def of(self, pages: Tensor, out: Tensor | None = None) -> Tensor:
        """Return pages as the receiver holds them. pages and out: uint8 [num_pages, page_bytes], contiguous."""
        out = torch.empty((len(pages), self.page_bytes), dtype=torch.uint8) if out is None else out
        rows = pages.view(-1, self.source.row_bytes).view(self.source.pool_dtype)
        sent = out.view(-1, self.target.row_bytes).view(self.target.pool_dtype)
        at_once = max(1, MOST_AT_ONCE // self.source.head_dim)
        for part, to in zip(rows.split(at_once), sent.split(at_once), strict=True):
            to.copy_(self.target.packed(self.source.expanded(part).to(self.target.dtype)))
        return out


def conversion_between(source: KvLayout, target: KvLayout) -> Conversion | None:
    """Return how pages are converted for a receiver whose layout differs in `dtype` at most; None: they are not."""
    if source.dtype == target.dtype:
        return None
    return Conversion(_rows(source), _rows(target), target.page_bytes)


def _rows(layout: KvLayout) -> KvRows:
    """Return the rows of a layout. Codes stand for values in float32: none is rounded between two codes."""
    code = coded_as(layout.dtype)
    return KvRows(layout.head_dim, torch.float32 if code else getattr(torch, layout.dtype), code)


@dataclass(slots=True, eq=False)
class Slot:
    """Rows of a stage that hold one slice, until its transfer has ended."""

    rows: range
    is_free: bool = True


class Stage:
    """Memory in which slices for one receiver at a time are converted."""

    def __init__(self, conversion: Conversion, num_slots: int, slot_pages: int) -> None:
        self.conversion = conversion
        self.is_taken = False  # a channel uses it
        view = np.zeros((num_slots * slot_pages, conversion.page_bytes), np.uint8)
        self.region = Region.of(view)
        self._view = torch.from_numpy(view)
        self._slots = [Slot(range(first, first + slot_pages)) for first in range(0, len(view), slot_pages)]

    @property
    def is_idle(self) -> bool:
        """Whether no channel uses it, and nothing is in flight out of it."""
        return not self.is_taken and all(slot.is_free for slot in self._slots)

    def fill(self, pages: Pages, own: Rows) -> tuple[Slot, Pages]:
        """Convert pages of the view `own` into a free slot; return that, and which rows hold them."""
        slot = next(slot for slot in self._slots if slot.is_free)
        rows = slot.rows[: len(pages)]
        slot.is_free = False
        self.conversion.of(torch.as_tensor(own[list(pages)]), self._view[rows.start : rows.stop])
        return slot, tuple(map(PageId, rows))
