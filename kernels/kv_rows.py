"""How K and V of a token and KV head lie in a page: as they are, or in a byte a value with one scale.

Invariant: a row's bytes depend on its own values alone. So equal values have the same bytes whatever chunk, batch, step
or worker wrote them, and pages are copied, found and compared as those of 16 bits are.

A coded row is its codes, then its scale in float32: a value is code * scale. The scale is the row's greatest magnitude
divided by the greatest code; codes are value / scale, rounded to the nearest, ties to even. Two kinds of rows have no
such scale:

- Below LEAST in all values: the scale is 0 and so are all codes. No scale is subnormal, on no processor.
- With a value that is not finite: the scale is NaN and all codes are 0, so the row is NaN wherever it is read. Such a
  sequence is broken without codes, too, and no other one reads the row.

`src/kv_rows.h` writes the same bytes. It reads them as this file does, but for two things that no worker does: e4m3's
code of NaN (0x7f), which nobody writes, is 480 there; and a thread that takes subnormal numbers as zero reads the
subnormal codes of e4m3 as zero, on processors without F16C.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.protocol.kvlayout import SCALED, KvCode

LEAST = 2.0**-100  # of the greatest magnitude of a row; bfloat16 keeps smaller values, which change no answer
WHOLE = 1.5 * 2.0**23  # a float32 of this size has no fraction; torch's round takes threads for few values already
GREATEST: dict[KvCode, float] = {"fp8_e4m3": 448.0, "int8": 127.0}  # codes


@dataclass(frozen=True, slots=True)
class KvRows:
    """The rows of a pool."""

    head_dim: int
    dtype: torch.dtype  # of K and V as they are computed, and as attention reads them
    code: KvCode | None = None  # None: rows are kept in that type

    @property
    def pool_dtype(self) -> torch.dtype:
        return self.dtype if self.code is None else torch.uint8

    @property
    def width(self) -> int:
        """Return a row's elements in the pool."""
        return self.head_dim if self.code is None else self.head_dim + SCALED[self.code]

    @property
    def row_bytes(self) -> int:
        return self.width * self.pool_dtype.itemsize

    def packed(self, values: Tensor) -> Tensor:
        """Return rows as a pool holds them: [.., width]. values: [.., head_dim], in any type of floats."""
        if self.code is None:
            return values
        wide = values.float()
        most = wide.abs().amax(-1, keepdim=True)  # NaN if one value is
        scale = most / GREATEST[self.code]
        scale = torch.where(most < LEAST, 0.0, torch.where(most < math.inf, scale, math.nan))
        scaled = torch.where(scale > 0.0, wide / scale, 0.0)
        codes = (scaled + WHOLE - WHOLE).to(torch.int8) if self.code == "int8" else scaled.to(torch.float8_e4m3fn)
        return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), -1)

    def expanded(self, rows: Tensor) -> Tensor:
        """Return the values of rows: [.., head_dim]. rows: [.., width]."""
        if self.code is None:
            return rows
        codes, scale = rows[..., : self.head_dim], rows[..., self.head_dim :].contiguous().view(torch.float32)
        typed = codes.view(torch.int8 if self.code == "int8" else torch.float8_e4m3fn)
        return typed.float().mul_(scale).to(self.dtype)
