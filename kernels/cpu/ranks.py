"""Sums, gathered rows and passed rows of the ranks of a worker, in memory that their processes share: see src/ranks.c.

All ranks make the same calls in the same order, over as many rows, and get the same sums, to the bit.
"""

import ctypes

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.cpu.calls import Call, Calls, Kind
from pdserve.kernels.cpu.library import DTYPES, Pointer, Size

SLOT_BYTES = 64 + 2 * 131_072  # as src/ranks.c has it
NAPS_A_SECOND = 10  # likewise


class RankMemory(ctypes.Structure):
    """`struct ranks` of src/ranks.c, and the memory. For one rank, which has one call at a time."""

    _fields_ = (("slots", Pointer), *((name, Size) for name in ("index", "size", "patience", "number", "missing")))

    def __init__(self, memory: Tensor, index: int, size: int, limit_s: float) -> None:
        """memory: uint8 [size * SLOT_BYTES], zeroed; of all ranks. limit_s: for the others in an exchange."""
        require_tensor("memory", memory, (size * SLOT_BYTES,), (torch.uint8,))
        require(0 <= index < size, f"index: {index} of {size}")
        super().__init__(memory.data_ptr(), index, size, max(1, int(limit_s * NAPS_A_SECOND)))
        self._memory = memory

    @property
    def missing_rank(self) -> int | None:
        """Return the rank that did not take part in time, or None. From then on results mean nothing."""
        return self.missing - 1 if self.missing else None


def sum_over_ranks(
    calls: Calls, ranks: RankMemory, x: Tensor, residual: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Return the sum of all ranks' x times `scale`, plus the residual, which it overwrites, if there is one.

    x: [num_rows, width]. Terms are added in float32, in the order of ranks.
    """
    require_tensor("x", x, (None, None), tuple(DTYPES))
    out = calls.empty(len(x), x.shape[1], x.dtype) if residual is None else residual
    require_tensor("residual", out, tuple(x.shape), (x.dtype,))
    require(x.is_contiguous() and out.is_contiguous(), "x and residual: rows must follow one another")
    call = Call(
        kind=Kind.RANKS_SUM, type=DTYPES[x.dtype], out=out.data_ptr(), x=x.data_ptr(), width=x.shape[1], scale=scale,
        residual=None if residual is None else residual.data_ptr(), ranks=ctypes.addressof(ranks),
    )  # fmt: skip
    calls.take(len(x), call)
    return out


def gather_columns(calls: Calls, ranks: RankMemory, x: Tensor, width: int) -> Tensor:
    """Return the columns of all ranks side by side on the first rank: [num_rows, width]; others' result means nothing.

    x: [num_rows, columns], of two or four bytes. A rank's columns are those from index * width // size on.
    """
    columns = (ranks.index + 1) * width // ranks.size - ranks.index * width // ranks.size
    require_tensor("x", x, (None, columns), (torch.float32, torch.bfloat16, torch.float16))
    out = calls.empty(len(x), width, x.dtype)
    call = Call(
        kind=Kind.RANKS_GATHER, type=DTYPES.get(x.dtype, DTYPES[torch.bfloat16]), out=out.data_ptr(), out_stride=width,
        x=x.data_ptr(), x_stride=x.stride(0), width=width, ranks=ctypes.addressof(ranks),
    )  # fmt: skip
    calls.take(len(x), call)
    return out


def pass_rows(calls: Calls, ranks: RankMemory, x: Tensor) -> None:
    """Copy x of the first of two ranks into x of the second one. x: [num_rows, width], of the same type on both."""
    require_tensor("x", x, (None, None), (torch.float32, torch.bfloat16, torch.float16))
    require(x.is_contiguous(), "x: rows must follow one another")
    require(ranks.size == 2, f"ranks: {ranks.size} of them")
    call = Call(
        kind=Kind.RANKS_PASS, out=x.data_ptr(), x=x.data_ptr(), width=x.shape[1] * x.element_size(),
        ranks=ctypes.addressof(ranks),
    )  # fmt: skip
    calls.take(len(x), call)
