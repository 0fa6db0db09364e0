"""What a layer computes of each row besides attention: products and lookups with weights in tiles, and RMSNorm.

A tile has 32 outputs and lies in memory in the order in which products read it. What a row becomes depends on that row
alone, not on how many rows there are.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.cpu.calls import Call, Calls, Kind
from pdserve.kernels.cpu.library import DTYPES, answer

TILE = 32  # outputs
LANES = 16  # of one vector
BLOCK = 32  # inputs of an output that share a scale and a minimum
MAX_INPUTS = 32_768  # rows of more do not fit on a thread's stack, where they are widened
BFLOAT16_BITS = 16
INPUT_BITS = 16  # of coded inputs, unless a worker asks for 8
PLAIN, ADDED, GATED = 0, 1, 2  # as src/products.h numbers them


@dataclass(frozen=True, slots=True)
class Tiles:
    """A matrix [width, inputs] in tiles. Gated: 16 gates and their 16 ups side by side in each tile."""

    data: Tensor  # bfloat16 [tiles, inputs / 2, TILE, 2]; or uint8 [tiles, inputs / BLOCK, bytes]: see `tiled_codes`
    bits: int  # BFLOAT16_BITS, or 4 or 8 of a code
    width: int  # outputs of a row: where gated, of gates
    dtype: torch.dtype  # of inputs and results
    bias: Tensor | None = None  # of each output, where gated in the order of the tiles
    gated: bool = False
    input_bits: int = INPUT_BITS  # 8 or 16: of the inputs' codes where weights are codes

    def __post_init__(self) -> None:
        require(self.input_bits in (8, 16), f"input_bits must be 8 or 16, got {self.input_bits}")
        if self.bias is not None:
            num_outputs = len(self.data) * TILE if self.gated else self.width
            require_tensor("bias", self.bias, (num_outputs,), (self.dtype,))

    @property
    def inputs(self) -> int:
        return self.data.shape[1] * (2 if self.bits == BFLOAT16_BITS else BLOCK)


def tiled(weight: Tensor, bias: Tensor | None = None) -> Tiles:
    """Put a bfloat16 matrix [width, inputs] into tiles, filled up with zeros; inputs must be even."""
    return Tiles(_tiled_pairs(weight), BFLOAT16_BITS, len(weight), torch.bfloat16, bias)


def tiled_gate_up(gate: Tensor, up: Tensor, bias: tuple[Tensor, Tensor] | None = None) -> Tiles:
    """Put SwiGLU's two matrices [width, inputs] into common tiles."""
    both = None if bias is None else interleaved(*bias)
    return Tiles(_tiled_pairs(interleaved(gate, up)), BFLOAT16_BITS, len(gate), torch.bfloat16, both, gated=True)


def tiled_codes(codes: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """Put a coded matrix into tiles, filled up with zeros: the codes of a tile's block, its scales, its minimums.

    codes: uint8 [width, inputs / BLOCK, BLOCK], or half as many bytes of 4 bits, byte j with inputs j (low) and j + 16.
    scales, minimums: float16 [width, inputs / BLOCK]. A weight is minimum + scale * code.
    """
    parts = [_steps(_filled(codes, TILE))]
    for each in (scales, minimums):
        by_tile = _filled(each, TILE).unflatten(0, (-1, TILE)).transpose(1, 2)
        parts.append(by_tile.contiguous().view(torch.uint8))
    return torch.cat(parts, -1)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Return 16 rows of one, 16 of the other, and so on, filled up with zeros."""
    blocks = [_filled(each, LANES).unflatten(0, (-1, LANES)) for each in (gate, up)]
    return torch.stack(blocks, 1).flatten(0, 2)


def multiplies_bfloat16(loaded: ctypes.CDLL) -> bool:
    """Say whether products of bfloat16 take no longer than float32's on this processor, as far as that was measured."""
    return answer(loaded, "pdserve_multiplies_bfloat16")


def multiplies_bytes(loaded: ctypes.CDLL) -> bool:
    """Say whether the library has the processor's own products of bytes."""
    return answer(loaded, "pdserve_multiplies_bytes")


def multiply(
    calls: Calls, x: Tensor, tiles: Tiles, residual: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply rows: x [num_rows, inputs] -> [num_rows, width], with bias and residual added or gated.

    The result has the dtype of x, or without bias, residual and gate the `out_dtype` that is asked for: float32 is what
    sums are. Bias, residual and gate are applied to float32 sums. The result overwrites the residual, if there is one.
    Where the weights are codes, the inputs are coded too, with `tiles.input_bits` and a scale for each BLOCK.
    """
    require_tensor("x", x, (None, tiles.inputs), (tiles.dtype,))
    num_rows, inputs = x.shape
    if residual is not None:
        require(not tiles.gated, "residual: none with gated tiles")
        require_tensor("residual", residual, (num_rows, tiles.width), (tiles.dtype,))
    out_dtype = out_dtype or tiles.dtype
    plain = residual is None and tiles.bias is None and not tiles.gated
    require(plain or out_dtype == tiles.dtype, f"out_dtype must be {tiles.dtype} with bias, residual or gate")
    out = calls.empty(num_rows, tiles.width, out_dtype) if residual is None else residual
    call = Call(
        kind=Kind.PRODUCT_BFLOAT16, type=DTYPES[tiles.dtype], out_type=DTYPES[out_dtype], out=out.data_ptr(),
        x=x.data_ptr(), out_stride=out.stride(0), x_stride=x.stride(0), inputs=inputs, width=tiles.width,
        weights=tiles.data.data_ptr(), bias=None if tiles.bias is None else tiles.bias.data_ptr(),
        after=GATED if tiles.gated else PLAIN, bits=tiles.bits,
    )  # fmt: skip
    if residual is not None:
        call.after, call.residual, call.residual_stride = ADDED, residual.data_ptr(), residual.stride(0)
    if tiles.bits == BFLOAT16_BITS:
        calls.take(num_rows, call)
        return out
    scratch = calls.empty(num_rows, inputs * tiles.input_bits // 8 + inputs // 4, torch.uint8)
    call.kind, call.scratch, call.input_bits = Kind.PRODUCT_QUANTIZED, scratch.data_ptr(), tiles.input_bits
    coding = Call(
        kind=Kind.CODING, type=call.type, x=call.x, x_stride=call.x_stride, inputs=inputs, scratch=call.scratch,
        input_bits=tiles.input_bits,
    )  # fmt: skip
    calls.take(num_rows, coding, call)
    return out


def look_up(calls: Calls, ids: Tensor, tiles: Tiles) -> Tensor:
    """Return rows of the matrix: ids int64 [num_rows], all below the width -> [num_rows, inputs]."""
    require_tensor("ids", ids, (None,), (torch.int64,))
    out = calls.empty(len(ids), tiles.inputs, tiles.dtype)
    call = Call(
        kind=Kind.LOOKUP_BFLOAT16 if tiles.bits == BFLOAT16_BITS else Kind.LOOKUP_QUANTIZED, type=DTYPES[tiles.dtype],
        out=out.data_ptr(), x=ids.data_ptr(), out_stride=tiles.inputs, inputs=tiles.inputs,
        weights=tiles.data.data_ptr(), bits=tiles.bits,
    )  # fmt: skip
    calls.take(len(ids), call)
    return out


def rms_norm(calls: Calls, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize rows [num_rows, width] to unit root mean square, then scale them by weight [width]."""
    require_tensor("x", x, (None, None), tuple(DTYPES))
    num_rows, width = x.shape
    require_tensor("weight", weight, (width,), (x.dtype,))
    out = calls.empty(num_rows, width, x.dtype)
    call = Call(
        kind=Kind.NORM, type=DTYPES[x.dtype], out=out.data_ptr(), x=x.data_ptr(), out_stride=width,
        x_stride=x.stride(0), width=width, weights=weight.data_ptr(), eps=eps,
    )  # fmt: skip
    calls.take(num_rows, call)
    return out


def _filled(matrix: Tensor, multiple: int) -> Tensor:
    """Append rows of zeros up to a multiple."""
    missing = -len(matrix) % multiple
    return torch.cat([matrix, matrix.new_zeros((missing, *matrix.shape[1:]))]) if missing else matrix


def _tiled_pairs(weight: Tensor) -> Tensor:
    """Return [tiles, inputs / 2, TILE, 2]."""
    require(weight.shape[1] % 2 == 0, f"inputs must be even, got {weight.shape[1]}")
    filled = _filled(weight, TILE)
    return filled.view(len(filled) // TILE, TILE, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def _steps(codes: Tensor) -> Tensor:
    """Return [tiles, blocks, bytes]: 4 bytes of each of 16 outputs, step by step, then those of the next 16."""
    num_blocks, num_bytes = codes.shape[1:]
    split = codes.view(-1, 2, LANES, num_blocks, num_bytes // 4, 4)
    return split.permute(0, 3, 1, 4, 2, 5).reshape(-1, num_blocks, TILE * num_bytes)
