"""What a layer computes of each row besides attention: products and lookups with weights in tiles, and norms.

A tile has 32 outputs and lies in memory in the order in which products read it. What a row becomes depends on that row
alone, not on how many rows there are.
"""

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.cpu.calls import Call, Calls, Kind
from pdserve.kernels.cpu.library import DTYPES, answer

TILE = 32  # outputs
LANES = 16  # of one vector
BLOCK = 32  # inputs of an output that share a scale and a minimum
SEGMENT = 128  # the same of FP8, which has scales alone
MAX_INPUTS = 32_768  # rows of more do not fit on a thread's stack, where they are widened
SCALE_BYTES = 4  # of FP8
BFLOAT16_BITS = 16
INPUT_BITS = 16  # of coded inputs, unless a worker asks for 8
PLAIN, ADDED, GATED = 0, 1, 2  # as src/products.h numbers them


class Activation(IntEnum):
    """As src/activations.h numbers them."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    SQUARED_RELU = 4
    XIELU = 5
    SWIGLU_OAI = 6  # of gates and their ups


@dataclass(frozen=True, slots=True)
class Finish:
    """What becomes of a product's sums with their bias, in this order; a residual is added last."""

    activation: Activation = Activation.NONE  # where gated, of gates
    xielu: tuple[float, float] = (0.0, 0.0)  # its scalars of what is above zero, and below
    scale: float = 1.0
    cap: float | None = None  # c of c * tanh(x / c)


PLAINLY = Finish()


@dataclass(frozen=True, slots=True)
class Tiles:
    """A matrix [width, inputs] in tiles. Gated: 16 gates and their 16 ups side by side in each tile."""

    data: Tensor  # bfloat16 [tiles, inputs / 2, TILE, 2]; or uint8: see `tiled_codes` and `tiled_fp8`
    bits: int  # BFLOAT16_BITS, or 4 or 8 of a code
    width: int  # outputs of a row: where gated, of gates
    dtype: torch.dtype  # of inputs and results
    bias: Tensor | None = None  # of each output, where gated in the order of the tiles
    gated: bool = False
    input_bits: int = INPUT_BITS  # 8 or 16: of the inputs' codes where weights are codes
    first: int = 0  # the id of the first row, for `look_up`: a part of an embedding has others
    is_float: bool = False  # codes of 4 bits are MXFP4's: a weight is minimum + scale * (12 + twice it); of 8, FP8's

    def __post_init__(self) -> None:
        require(self.input_bits in (8, 16), f"input_bits must be 8 or 16, got {self.input_bits}")
        require(self.bits < BFLOAT16_BITS or not self.is_float, f"codes of floats have 4 or 8 bits, got {self.bits}")
        require(self.codes_inputs or self.dtype == torch.bfloat16, f"products take bfloat16, not {self.dtype}")
        if self.bias is not None:
            num_outputs = len(self.data) * TILE if self.gated else self.width
            require_tensor("bias", self.bias, (num_outputs,), (self.dtype,))

    @property
    def inputs(self) -> int:
        return inputs_of(self.data, self.bits, is_float=self.is_float)

    @property
    def codes_inputs(self) -> bool:
        return codes_inputs(self.bits, is_float=self.is_float)


def inputs_of(data: Tensor, bits: int, *, is_float: bool) -> int:
    """Return how many inputs tiles have. data: [tiles, ...]."""
    if bits == BFLOAT16_BITS:
        return 2 * data.shape[1]
    if codes_inputs(bits, is_float=is_float):
        return BLOCK * data.shape[1]
    num_bytes = data.shape[1] // TILE  # an output's, with its scales
    return num_bytes - -(-num_bytes // (SEGMENT + SCALE_BYTES)) * SCALE_BYTES


def codes_inputs(bits: int, *, is_float: bool) -> bool:
    """Say whether products with such weights code their inputs, too; others take them in bfloat16."""
    return bits == 4 or (bits == 8 and not is_float)


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """A bfloat16 matrix [width, inputs] of each head, in tiles."""

    data: Tensor  # [num_heads, tiles, inputs / 2, TILE, 2]
    width: int

    @property
    def inputs(self) -> int:
        return 2 * self.data.shape[2]

    @classmethod
    def of(cls, weights: Tensor) -> Self:
        """weights: bfloat16 [num_heads, width, inputs]; inputs must be even."""
        return cls(torch.stack([_tiled_pairs(each) for each in weights]), weights.shape[1])


def tiled(weight: Tensor, bias: Tensor | None = None) -> Tiles:
    """Put a bfloat16 matrix [width, inputs] into tiles, filled up with zeros; inputs must be even."""
    return Tiles(_tiled_pairs(weight), BFLOAT16_BITS, len(weight), torch.bfloat16, bias)


def tiled_gate_up(gate: Tensor, up: Tensor, bias: tuple[Tensor, Tensor] | None = None) -> Tiles:
    """Put the two matrices [width, inputs] of a gated unit into common tiles."""
    both = None if bias is None else interleaved(*bias)
    return Tiles(_tiled_pairs(interleaved(gate, up)), BFLOAT16_BITS, len(gate), torch.bfloat16, both, gated=True)


def tiled_codes(codes: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """Put a coded matrix into tiles, filled up with zeros: the codes of a tile's block, its scales, its minimums.

    codes: uint8 [width, inputs / BLOCK, BLOCK], or half as many bytes of 4 bits, byte j with inputs j (low) and j + 16.
    scales, minimums: float16 [width, inputs / BLOCK]. A weight is minimum + scale * code; see `Tiles` for floats.
    """
    parts = [_steps(_filled(codes, TILE))]
    for each in (scales, minimums):
        by_tile = _filled(each, TILE).unflatten(0, (-1, TILE)).transpose(1, 2)
        parts.append(by_tile.contiguous().view(torch.uint8))
    return torch.cat(parts, -1)


def tiled_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """Put a matrix in FP8 (e4m3) into tiles, filled up with zeros: for each SEGMENT its scales, then pairs of codes.

    codes: uint8 [width, inputs], an even number, without NaN. scales: float32 [width, inputs / SEGMENT], rounded up.
    """
    require(codes.shape[1] % 2 == 0, f"inputs must be even, got {codes.shape[1]}")
    by_tile = _filled(scales, TILE).unflatten(0, (-1, TILE)).transpose(1, 2).contiguous().view(torch.uint8)
    pairs = _tiled_pairs(codes)
    parts = []
    for segment, first in enumerate(range(0, codes.shape[1], SEGMENT)):
        parts += [by_tile[:, segment], pairs[:, first // 2 : (first + SEGMENT) // 2].flatten(1)]
    return torch.cat(parts, 1)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Return 16 rows of one, 16 of the other, and so on, filled up with zeros."""
    blocks = [_filled(each, LANES).unflatten(0, (-1, LANES)) for each in (gate, up)]
    return torch.stack(blocks, 1).flatten(0, 2)


def multiplies_bfloat16(loaded: ctypes.CDLL) -> bool:
    """Say whether products of bfloat16 take no longer than float32's on this processor, as far as that was measured."""
    return answer(loaded, "pdserve_multiplies_bfloat16")


def has_matrix_unit(loaded: ctypes.CDLL) -> bool:
    """Say whether products of bfloat16 are a matrix unit's (AMX)."""
    return answer(loaded, "pdserve_has_matrix_unit")


def use_matrix_unit(loaded: ctypes.CDLL, *, wanted: bool) -> None:
    """Compute with vectors from now on, in this process, or again with the matrix unit where there is one."""
    loaded.pdserve_use_matrix_unit(ctypes.c_int64(wanted))


def multiplies_bytes(loaded: ctypes.CDLL) -> bool:
    """Say whether the library has the processor's own products of bytes."""
    return answer(loaded, "pdserve_multiplies_bytes")


def multiply(
    calls: Calls,
    x: Tensor,
    tiles: Tiles,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    finish: Finish = PLAINLY,
) -> Tensor:
    """Multiply rows: x [num_rows, inputs] -> [num_rows, width], with bias, activation, scale and residual, or gated.

    out: where the result goes, of the dtype of x, or without bias, residual and gate of float32: that is what sums are;
    it may be some columns of a wider matrix. All that follows a sum is applied to it in float32. The result overwrites
    the residual, if there is one.
    Where the weights are codes, the inputs are coded too, with `tiles.input_bits` and a scale for each BLOCK.
    """
    require_tensor("x", x, (None, tiles.inputs), (tiles.dtype,))
    num_rows, inputs = x.shape
    if residual is not None:
        require(not tiles.gated, "residual: none with gated tiles")
        require_tensor("residual", residual, (num_rows, tiles.width), (tiles.dtype,))
    if tiles.gated:
        require(finish.scale == 1.0 and finish.cap is None, "finish: neither scale nor cap with gated tiles")
        require(finish.activation != Activation.NONE, "finish: gates need an activation")
    plain = residual is None and tiles.bias is None and not tiles.gated
    if out is None:
        out = calls.empty(num_rows, tiles.width, tiles.dtype) if residual is None else residual
    else:
        require(residual is None, "out: the result of a residual overwrites it")
        require_tensor("out", out, (num_rows, tiles.width), tuple(DTYPES) if plain else (tiles.dtype,))
    call = Call(
        kind=Kind.PRODUCT_BFLOAT16, type=DTYPES[tiles.dtype], out_type=DTYPES[out.dtype], out=out.data_ptr(),
        x=x.data_ptr(), out_stride=out.stride(0), x_stride=x.stride(0), inputs=inputs, width=tiles.width,
        weights=tiles.data.data_ptr(), bias=None if tiles.bias is None else tiles.bias.data_ptr(),
        after=GATED if tiles.gated else PLAIN, bits=tiles.bits, is_float=tiles.is_float, activation=finish.activation,
        scale=finish.scale, cap=finish.cap or 0.0, positive=finish.xielu[0], negative=finish.xielu[1],
    )  # fmt: skip
    if residual is not None:
        call.after, call.residual, call.residual_stride = ADDED, residual.data_ptr(), residual.stride(0)
    if not tiles.codes_inputs:
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


def multiply_heads(calls: Calls, x: Tensor, tiles: HeadTiles, num_more: int = 0) -> Tensor:
    """Multiply the first inputs of each head: x [num_rows, num_heads, features] -> [num_rows, heads * width].

    The result has room for `num_more` heads, which are not written.
    """
    require_tensor("x", x, (None, len(tiles.data), None), (torch.bfloat16,))
    require(x.shape[2] >= tiles.inputs, f"x must have {tiles.inputs} features in each head, got {x.shape[2]}")
    num_heads = len(tiles.data)
    out = calls.empty(len(x), (num_heads + num_more) * tiles.width, torch.bfloat16)
    dtype = DTYPES[torch.bfloat16]
    call = Call(
        kind=Kind.PRODUCT_HEADS, type=dtype, out_type=dtype, out=out.data_ptr(), x=x.data_ptr(),
        out_stride=out.stride(0), x_stride=x.stride(0), inputs=tiles.inputs, width=tiles.width, scale=1.0,
        weights=tiles.data.data_ptr(), after=PLAIN, bits=BFLOAT16_BITS, num_heads=num_heads, x_head=x.stride(1),
    )  # fmt: skip
    calls.take(len(x), call)
    return out


def look_up(calls: Calls, ids: Tensor, tiles: Tiles, scale: float = 1.0) -> Tensor:
    """Return rows of the matrix times `scale`: ids int64 [num_rows] -> [num_rows, inputs].

    Ids of which there is no row, since the matrix is a part of one, get zeros.
    """
    require_tensor("ids", ids, (None,), (torch.int64,))
    require(tiles.codes_inputs or not tiles.is_float, "tiles: none in FP8")
    out = calls.empty(len(ids), tiles.inputs, tiles.dtype)
    call = Call(
        kind=Kind.LOOKUP_BFLOAT16 if tiles.bits == BFLOAT16_BITS else Kind.LOOKUP_QUANTIZED, type=DTYPES[tiles.dtype],
        out=out.data_ptr(), x=ids.data_ptr(), out_stride=tiles.inputs, inputs=tiles.inputs,
        width=tiles.width, weights=tiles.data.data_ptr(), bits=tiles.bits, is_float=tiles.is_float, scale=scale,
        first=tiles.first,
    )  # fmt: skip
    calls.take(len(ids), call)
    return out


def rms_norm(calls: Calls, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalize rows [num_rows, width] to unit root mean square, then scale them by weight [width].

    The result is added to the residual, which it overwrites, if there is one.
    """
    _require_rows(x, weight=weight)
    if residual is not None:
        require_tensor("residual", residual, tuple(x.shape), (x.dtype,))
    out = calls.empty(len(x), x.shape[1], x.dtype) if residual is None else residual
    call = _norm(Kind.NORM, x, out, weight, eps)
    if residual is not None:
        call.residual, call.residual_stride = residual.data_ptr(), residual.stride(0)
    calls.take(len(x), call)
    return out


def rms_norm_(calls: Calls, x: Tensor, weight: Tensor, eps: float) -> None:
    """Do as `rms_norm`, in place; x may be some columns of a wider matrix."""
    _require_rows(x, weight=weight)
    calls.take(len(x), _norm(Kind.NORM, x, x, weight, eps))


def layer_norm(calls: Calls, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalize rows [num_rows, width] to mean zero and variance one, then scale them by weight and add bias."""
    _require_rows(x, weight=weight, bias=bias)
    out = calls.empty(len(x), x.shape[1], x.dtype)
    call = _norm(Kind.LAYER_NORM, x, out, weight, eps)
    call.bias = bias.data_ptr()
    calls.take(len(x), call)
    return out


def _norm(kind: Kind, x: Tensor, out: Tensor, weight: Tensor, eps: float) -> Call:
    return Call(
        kind=kind, type=DTYPES[x.dtype], out=out.data_ptr(), x=x.data_ptr(), out_stride=out.stride(0),
        x_stride=x.stride(0), width=len(weight), weights=weight.data_ptr(), eps=eps,
    )  # fmt: skip


def _require_rows(x: Tensor, **of_columns: Tensor) -> None:
    require_tensor("x", x, (None, None), tuple(DTYPES))
    for name, each in of_columns.items():
        require_tensor(name, each, (x.shape[1],), (x.dtype,))


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
