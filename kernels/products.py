"""Products with coded matrices on a GPU: codes become floats in registers, so that no others are read or kept.

Inputs stay as they are, or are rounded to 8 bits a row where the weights have 8 bits as well and the chip multiplies
such (`rounds_inputs`). Grids depend on shapes alone, so that steps can be captured.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.code_blocks import BLOCK, ZEROS, CodeBlocks
from pdserve.kernels.device import products as device_products
from pdserve.kernels.pageio import power_of_two
from pdserve.kernels.tuning import Device, device_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED = torch.device("cpu")
UNITS = {"int4": 1.0, "int8": 1.0, "fp4": 2.0**15, "fp8": 2.0**8}  # of the values that codes become
FEW_ROWS = 16  # of a block
MOST_INPUTS = 128  # of a block
MAX_SPLITS, MIN_INPUTS = 8, 512  # parts of the inputs, and inputs in each
PROGRAMS_PER_SM = 4  # that splitting aims at
SUM_BLOCK = 1024
MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class Finish:
    """What a product becomes: (it + bias) * scale + residual, which the result overwrites."""

    residual: Tensor | None = None  # [num_rows, outputs]
    scale: float = 1.0


PLAINLY = Finish()


@dataclass(frozen=True, slots=True)
class Rows:
    """The inputs of a product: floats, or codes with scales."""

    data: Tensor  # [num_rows, inputs]
    scales: Tensor  # float32 [num_rows, groups]; where there are none, any tensor
    group: int = 0  # inputs that share a scale; 0: there are none


def product(
    x: Tensor, weight: CodeBlocks, finish: Finish = PLAINLY, *, rounded: bool = False, chip: Device | None = None
) -> Tensor:
    """Multiply rows with a matrix: [num_rows, outputs] of x's dtype.

    x: [num_rows, inputs]. rounded: to 8 bits first, see `rounds_inputs`.
    """
    require_tensor("x", x, (None, weight.inputs), DTYPES)
    chip = chip or device_of(str(x.device))
    num_rows, width, residual = len(x), weight.outputs, finish.residual
    if weight.bias is not None:
        require_tensor("bias", weight.bias, (width,), (x.dtype,))
    if residual is not None:
        require_tensor("residual", residual, (num_rows, width), (x.dtype,))
        require(residual.is_contiguous(), "residual: must be contiguous")
    out = x.new_empty((num_rows, width)) if residual is None else residual
    if num_rows == 0:
        return out
    x = x if weight.order is None else x.index_select(1, weight.order)
    rows = coded_rows(x, weight) if rounded else Rows(x, x)
    tile = tile_of(num_rows, weight, is_exact=x.dtype == torch.float32)
    splits = num_splits(num_rows, weight, tile, chip)
    bias, onto = (x if each is None else each for each in (weight.bias, residual))
    target = out if splits == 1 else torch.empty((splits, num_rows, width), dtype=torch.float32, device=x.device)
    device_products.product[-(-num_rows // tile.rows), -(-width // tile.width), splits](
        rows.data, rows.scales, weight.codes, weight.scales,
        weight.scales if weight.minimums is None else weight.minimums, bias, onto, target,
        num_rows, rows.data.stride(0), width, finish.scale, rows.scales.shape[1],
        WIDTH=width, HAS_BIAS=weight.bias is not None, HAS_RESIDUAL=residual is not None, NUM_SPLITS=splits,
        BLOCK_ROWS=tile.rows, BLOCK_WIDTH=tile.width, **constants(rows, weight),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        device_products.sum_splits[num_rows, -(-width // SUM_BLOCK)](
            target, bias, onto, out, num_rows, width, finish.scale, WIDTH=width, NUM_SPLITS=splits,
            HAS_BIAS=weight.bias is not None, HAS_RESIDUAL=residual is not None, BLOCK=SUM_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def rounds_inputs(weight: CodeBlocks, chip: Device) -> bool:
    """Say whether the chip multiplies the matrix with inputs of 8 bits."""
    if weight.kind == "fp8":
        return chip.multiplies_e4m3
    return weight.kind == "int8" and weight.minimums is None


def coded_rows(x: Tensor, weight: CodeBlocks) -> Rows:
    """Round rows to the kind of a matrix: with a scale for each row, or for each group of a matrix of floats."""
    num_rows, inputs = x.shape
    dtype = torch.int8 if weight.kind == "int8" else torch.float8_e4m3fn
    group = min(weight.group, inputs) if weight.kind == "fp8" else inputs
    groups = -(-inputs // group)
    codes = torch.empty((num_rows, inputs), dtype=dtype, device=x.device)
    scales = torch.empty((num_rows, groups), dtype=torch.float32, device=x.device)
    device_products.code_rows[num_rows, groups](
        x, codes, scales, x.stride(0), groups, INPUTS=inputs, GROUP=group, MOST=MOST[dtype],
        IS_FLOAT=weight.kind == "fp8", BLOCK=power_of_two(group), num_warps=8 if group > 2048 else 4,
    )  # fmt: skip
    return Rows(codes, scales, group)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is launched."""

    rows: int
    width: int
    num_warps: int
    num_stages: int


def tile_of(num_rows: int, weight: CodeBlocks, *, is_exact: bool) -> Tile:
    """Return the tile for so many rows. is_exact: of float32, which is served for exactness, not speed.

    Chosen from the compiler's reports: no spills, and with few rows 7 to 24 KiB of codes on their way to each program.
    """
    if is_exact:
        return Tile(FEW_ROWS, 64, 4, 2)
    if num_rows > 64:
        return Tile(128, 128, 8, 3)
    rows = max(FEW_ROWS, power_of_two(num_rows))
    return Tile(rows, 64, 4, 8 if block_inputs(weight) == BLOCK else 4)


def num_splits(num_rows: int, weight: CodeBlocks, tile: Tile, chip: Device) -> int:
    """Return how many parts the inputs are divided in, so that few rows and outputs fill the chip, too.

    A power of two: kernels are compiled for it, and a worker compiles those of steps of powers of two before it serves.
    """
    programs = -(-num_rows // tile.rows) * -(-weight.outputs // tile.width)
    most = max(1, min(MAX_SPLITS, weight.inputs // MIN_INPUTS, PROGRAMS_PER_SM * chip.num_sms // programs))
    return 1 << (most.bit_length() - 1)


def block_inputs(weight: CodeBlocks, most: int = MOST_INPUTS) -> int:
    """Return the inputs of a block: a power of two that divides a group, so that a block has one scale."""
    if weight.group >= weight.inputs:
        return min(most, max(BLOCK, power_of_two(weight.inputs)))
    return min(most, weight.group & -weight.group)


def constants(rows: Rows, weight: CodeBlocks) -> dict[str, object]:
    """Return what a kernel is compiled for, of a matrix and its inputs."""
    is_e4m3 = rows.data.dtype == torch.float8_e4m3fn
    is_exact = rows.data.dtype == torch.float32 and rows.data.device != INTERPRETED
    return {
        "INPUTS": weight.inputs,
        "KIND": weight.kind,
        "ZERO": 0 if weight.minimums is not None else ZEROS.get(weight.kind, 0),
        "UNIT": 1.0 if is_e4m3 else UNITS[weight.kind],
        "GROUP": weight.group,
        "X_GROUP": rows.group,
        "HAS_MINIMUMS": weight.minimums is not None,
        "PRECISION": "native" if rows.group > 0 else precision_of(rows.data),
        "BLOCK_INPUTS": block_inputs(weight, BLOCK if is_exact else MOST_INPUTS),  # more would spill
    }


def precision_of(x: Tensor) -> str:
    """Return how floats are multiplied: as they are, or in float32, as the interpreter must."""
    return "ieee" if x.dtype == torch.float32 or x.device == INTERPRETED else "native"
