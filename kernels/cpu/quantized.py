"""Matrix products with quantized weights, in tiles of 32 outputs as the compiled kernels read them."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.cpu.calls import Call, Calls, Kind
from pdserve.kernels.cpu.library import answer
from pdserve.kernels.cpu.products import LANES, TILE, filled, lookup_call, product_call, require_bias

BLOCK = 32  # inputs that share a scale and a minimum


@dataclass(frozen=True, slots=True)
class QuantizedTiles:
    """A matrix [width, inputs] of codes with 4 or 8 bits, in tiles. Gated: 16 gates and their 16 ups in each tile."""

    data: Tensor  # uint8 [tiles, inputs / BLOCK, bytes]: codes, scales, minimums
    bits: int
    width: int  # outputs of a row: where gated, of gates
    dtype: torch.dtype  # of inputs and results
    bias: Tensor | None = None  # of each output, where gated in the order of the tiles
    gated: bool = False

    def __post_init__(self) -> None:
        require_bias(self.bias, len(self.data) * TILE if self.gated else self.width, self.dtype)

    @property
    def inputs(self) -> int:
        return self.data.shape[1] * BLOCK


def tiled_codes(codes: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """Put a coded matrix into tiles, filled up with zeros.

    codes: uint8 [width, inputs / BLOCK, BLOCK], or half as many bytes of 4 bits, byte j with inputs j (low) and j + 16.
    scales, minimums: float16 [width, inputs / BLOCK]. A weight is minimum + scale * code.
    """
    parts = [_steps(filled(codes, TILE))]
    for each in (scales, minimums):
        by_tile = filled(each, TILE).unflatten(0, (-1, TILE)).transpose(1, 2)
        parts.append(by_tile.contiguous().view(torch.uint8))
    return torch.cat(parts, -1)


def _steps(codes: Tensor) -> Tensor:
    """Return [tiles, blocks, bytes]: 4 bytes of each of 16 outputs, step by step, then those of the next 16."""
    num_blocks, num_bytes = codes.shape[1:]
    split = codes.view(-1, 2, LANES, num_blocks, num_bytes // 4, 4)
    return split.permute(0, 3, 1, 4, 2, 5).reshape(-1, num_blocks, TILE * num_bytes)


def multiplies_bytes(loaded: ctypes.CDLL) -> bool:
    """Say whether the library has the processor's own products of bytes."""
    return answer(loaded, "pdserve_multiplies_bytes")


def multiply_codes(calls: Calls, x: Tensor, tiles: QuantizedTiles, residual: Tensor | None = None) -> Tensor:
    """Multiply rows as `products.multiply` does, with inputs that are coded with 8 bits."""
    call, out = product_call(calls, x, tiles, residual, tiles.dtype)
    scratch = calls.empty(len(x), tiles.inputs + tiles.inputs // 4, torch.uint8)
    call.kind, call.bits, call.scratch = Kind.PRODUCT_QUANTIZED, tiles.bits, scratch.data_ptr()
    coding = Call(
        kind=Kind.CODING, type=call.type, x=call.x, x_stride=call.x_stride, inputs=call.inputs, scratch=call.scratch
    )
    calls.take(len(x), coding, call)
    return out


def decode(calls: Calls, ids: Tensor, tiles: QuantizedTiles) -> Tensor:
    """Decode rows of the matrix: ids int64 [num_rows], all below the width -> [num_rows, inputs]."""
    call, out = lookup_call(calls, ids, tiles, tiles.dtype)
    call.kind, call.bits = Kind.LOOKUP_QUANTIZED, tiles.bits
    calls.take(len(ids), call)
    return out
