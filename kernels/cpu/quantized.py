"""Matrix products with quantized weights, in tiles of 32 outputs as the compiled kernels read them."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.cpu.library import DTYPES, Pointer, Size, function
from pdserve.kernels.cpu.products import ADDED, GATED, LANES, PLAIN, TILE, answer, filled, require_bias

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


class QuantizedProducts:
    """The library's quantized products. What a row becomes depends on that row alone."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        arguments = (Pointer, Size, Pointer, Size, Size, Size, Pointer, Pointer, Pointer, Size, Size, Size, Size, Size)
        self._product = function(loaded, "pdserve_product_quantized", *arguments)
        self.is_fast = answer(loaded, "pdserve_multiplies_bytes")  # with the processor's own products of bytes
        self._rows = function(loaded, "pdserve_rows_quantized", Pointer, Pointer, Size, Size, Pointer, Size, Size)

    def product(self, x: Tensor, tiles: QuantizedTiles, residual: Tensor | None = None) -> Tensor:
        """Multiply rows: x [num_rows, inputs] -> [num_rows, width], with bias and residual added or gated.

        Inputs are coded with 8 bits. Bias, residual and gate are applied to float32 sums.
        """
        require_tensor("x", x, (None, tiles.inputs), (tiles.dtype,))
        num_rows, inputs = x.shape
        after, added, stride = GATED if tiles.gated else PLAIN, None, 0
        if residual is not None:
            require(not tiles.gated, "residual: none with gated tiles")
            require_tensor("residual", residual, (num_rows, tiles.width), (x.dtype,))
            after, added, stride = ADDED, residual.data_ptr(), residual.stride(0)
        bias = None if tiles.bias is None else tiles.bias.data_ptr()
        out = torch.empty((num_rows, tiles.width), dtype=x.dtype)
        rows = (out.data_ptr(), tiles.width, x.data_ptr(), x.stride(0), num_rows, inputs)
        kind = (tiles.bits, DTYPES[x.dtype])
        self._product(*rows, tiles.data.data_ptr(), bias, added, stride, tiles.width, after, *kind)
        return out

    def rows(self, ids: Tensor, tiles: QuantizedTiles) -> Tensor:
        """Decode rows of the matrix: ids int64 [num_rows], all below the width -> [num_rows, inputs]."""
        require_tensor("ids", ids, (None,), (torch.int64,))
        out = torch.empty((len(ids), tiles.inputs), dtype=tiles.dtype)
        where = (out.data_ptr(), ids.data_ptr(), len(ids), tiles.inputs)
        self._rows(*where, tiles.data.data_ptr(), tiles.bits, DTYPES[tiles.dtype])
        return out
