"""Matrix products with weights in tiles of 32 outputs, which lie in memory in the order they are used."""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.cpu.calls import Call, Calls, Kind
from pdserve.kernels.cpu.library import DTYPES, answer

TILE = 32  # outputs
LANES = 16  # of one vector
MAX_INPUTS = 32_768  # rows of more do not fit on a thread's stack, where they are widened
PLAIN, ADDED, GATED = 0, 1, 2  # as src/products.h numbers them


@dataclass(frozen=True, slots=True)
class Tiles:
    """A bfloat16 matrix [width, inputs], in tiles. Gated: 16 gates and their 16 ups side by side in each tile."""

    data: Tensor  # [tiles, inputs / 2, TILE, 2]
    width: int  # outputs of a row: where gated, of gates
    bias: Tensor | None = None  # of each output, where gated in the order of the tiles
    gated: bool = False

    def __post_init__(self) -> None:
        require_bias(self.bias, len(self.data) * TILE if self.gated else self.width, self.data.dtype)

    @property
    def inputs(self) -> int:
        return self.data.shape[1] * 2


def tiled(weight: Tensor, bias: Tensor | None = None) -> Tiles:
    """Put a matrix [width, inputs] into tiles, filled up with zeros; inputs must be even."""
    return Tiles(_tiles(weight), len(weight), bias)


def tiled_gate_up(gate: Tensor, up: Tensor, bias: tuple[Tensor, Tensor] | None = None) -> Tiles:
    """Put SwiGLU's two matrices [width, inputs] into common tiles."""
    both = None if bias is None else interleaved(*bias)
    return Tiles(_tiles(interleaved(gate, up)), len(gate), both, gated=True)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Return 16 rows of one, 16 of the other, and so on, filled up with zeros."""
    blocks = [filled(each, LANES).unflatten(0, (-1, LANES)) for each in (gate, up)]
    return torch.stack(blocks, 1).flatten(0, 2)


def filled(matrix: Tensor, multiple: int) -> Tensor:
    """Append rows of zeros up to a multiple."""
    missing = -len(matrix) % multiple
    return torch.cat([matrix, matrix.new_zeros((missing, *matrix.shape[1:]))]) if missing else matrix


def require_bias(bias: Tensor | None, num_outputs: int, dtype: torch.dtype) -> None:
    """Check a bias of tiles, if there is one, for all products with them."""
    if bias is not None:
        require_tensor("bias", bias, (num_outputs,), (dtype,))


def multiplies_bfloat16(loaded: ctypes.CDLL) -> bool:
    """Say whether products of bfloat16 take no longer than float32's on this processor, as far as that was measured."""
    return answer(loaded, "pdserve_multiplies_bfloat16")


class AnyTiles(Protocol):
    """What products need to know of a matrix in tiles, whatever its elements are."""

    @property
    def data(self) -> Tensor: ...
    @property
    def width(self) -> int: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def gated(self) -> bool: ...
    @property
    def inputs(self) -> int: ...


def multiply(calls: Calls, x: Tensor, tiles: Tiles, residual: Tensor | None = None) -> Tensor:
    """Multiply rows: x [num_rows, inputs] -> [num_rows, width], with bias and residual added or gated.

    Bias, residual and gate are applied to float32 sums. The result overwrites the residual, if there is one. What a row
    becomes depends on that row alone, not on how many there are.
    """
    call, out = product_call(calls, x, tiles, residual, torch.bfloat16)
    call.kind = Kind.PRODUCT_BFLOAT16
    calls.take(len(x), call)
    return out


def look_up(calls: Calls, ids: Tensor, tiles: Tiles) -> Tensor:
    """Return rows of the matrix: ids int64 [num_rows], all below the width -> [num_rows, inputs]."""
    call, out = lookup_call(calls, ids, tiles, torch.bfloat16)
    call.kind = Kind.LOOKUP_BFLOAT16
    calls.take(len(ids), call)
    return out


def product_call(
    calls: Calls, x: Tensor, tiles: AnyTiles, residual: Tensor | None, dtype: torch.dtype
) -> tuple[Call, Tensor]:
    """Describe a product, all but what depends on the elements of the matrix; returns the result's memory too."""
    require_tensor("x", x, (None, tiles.inputs), (dtype,))
    num_rows, inputs = x.shape
    if residual is not None:
        require(not tiles.gated, "residual: none with gated tiles")
        require_tensor("residual", residual, (num_rows, tiles.width), (dtype,))
    out = calls.empty(num_rows, tiles.width, dtype) if residual is None else residual
    call = Call(
        type=DTYPES[dtype], out=out.data_ptr(), x=x.data_ptr(), out_stride=out.stride(0), x_stride=x.stride(0),
        inputs=inputs, width=tiles.width, weights=tiles.data.data_ptr(),
        bias=None if tiles.bias is None else tiles.bias.data_ptr(), after=GATED if tiles.gated else PLAIN,
    )  # fmt: skip
    if residual is not None:
        call.after, call.residual, call.residual_stride = ADDED, residual.data_ptr(), residual.stride(0)
    return call, out


def lookup_call(calls: Calls, ids: Tensor, tiles: AnyTiles, dtype: torch.dtype) -> tuple[Call, Tensor]:
    """Describe a lookup, as `product_call` does a product."""
    require_tensor("ids", ids, (None,), (torch.int64,))
    out = calls.empty(len(ids), tiles.inputs, dtype)
    call = Call(
        type=DTYPES[dtype], out=out.data_ptr(), x=ids.data_ptr(), out_stride=tiles.inputs, inputs=tiles.inputs,
        weights=tiles.data.data_ptr(),
    )  # fmt: skip
    return call, out


def _tiles(weight: Tensor) -> Tensor:
    require(weight.shape[1] % 2 == 0, f"inputs must be even, got {weight.shape[1]}")
    width, inputs = filled(weight, TILE).shape
    return filled(weight, TILE).view(width // TILE, TILE, inputs // 2, 2).transpose(1, 2).contiguous()
