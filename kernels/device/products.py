"""Products with matrices of codes: codes become floats in registers, and sums of a group's inputs take its scale.

A code of floats becomes the float16 with the same bits at the same end: exact, but for a power of two (`UNIT`), on
chips without floats of 8 bits, too. Codes are in the order that `kernels.code_blocks.CodeBlocks` describes.
"""

import triton
import triton.language as tl

from pdserve.kernels.device.codes import e4m3_numbers


@triton.jit
def _values(codes, KIND: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr):
    """Return what codes stand for, but for their unit."""
    if dtype == tl.int8:
        return (codes ^ 128).to(tl.int8, bitcast=True)
    elif dtype == tl.float8e4nv:  # noqa: RET505 - else the other branches are compiled, too
        return codes.to(tl.float8e4nv, bitcast=True)
    elif KIND == "fp4":
        bits = codes.to(tl.uint16)
        return (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True).to(dtype)
    elif KIND == "fp8":
        return e4m3_numbers(codes, dtype)
    else:
        return (codes.to(tl.int16) - ZERO).to(tl.float32).to(dtype)


@triton.jit
def _dot(x, w, sums, PRECISION: tl.constexpr):
    if PRECISION == "ieee":
        return tl.dot(x.to(tl.float32), w.to(tl.float32), sums, input_precision="ieee")
    # Hopper sums products of floats of 8 bits with fewer bits than float32 has: no longer than a block of inputs. What
    # that costs was not measured.
    return tl.dot(x, w, sums, out_dtype=sums.dtype, max_num_imprecise_acc=x.shape[1])


@triton.jit
def coded_sums(
    x, in_rows, x_scales, codes_ptr, scales_ptr, minimums_ptr, output, in_width, num_outputs, first, last,
    INPUTS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
    X_GROUP: tl.constexpr, HAS_MINIMUMS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the products of rows with some outputs, float32 [BLOCK_ROWS, BLOCK_WIDTH], over some blocks of inputs.

    x: pointers [BLOCK_ROWS, 1] to rows, of codes where X_GROUP inputs share one of x_scales (pointers [BLOCK_ROWS]).
    """
    IS_ONE_GROUP: tl.constexpr = GROUP >= INPUTS
    PER: tl.constexpr = 16 if KIND == "int4" or KIND == "fp4" else 32  # bytes of 32 codes
    dtype: tl.constexpr = x.dtype.element_ty
    SUMS: tl.constexpr = tl.int32 if dtype == tl.int8 else tl.float32
    byte = tl.arange(0, BLOCK_INPUTS * PER // 32)
    in_block = byte // PER
    sums = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    inner = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), SUMS)
    for step in range(first, last):
        start = step * BLOCK_INPUTS
        tile = codes_ptr + (start // 32).to(tl.int64) * num_outputs * PER
        place = start + in_block * 32 + byte % PER
        codes = tl.load(
            tile + (in_block * num_outputs * PER + byte % PER)[:, None] + output[None, :] * PER,
            (start + in_block * 32 < INPUTS)[:, None] & in_width[None, :], other=0,
        )  # fmt: skip
        x_low = tl.load(x + place[None, :], in_rows[:, None] & (place < INPUTS)[None, :], other=0.0)
        if not IS_ONE_GROUP:
            inner = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), SUMS)
        if PER == 16:
            x_high = tl.load(x + place[None, :] + 16, in_rows[:, None] & (place + 16 < INPUTS)[None, :], other=0.0)
            inner = _dot(x_low, _values(codes & 15, KIND, ZERO, dtype), inner, PRECISION)
            inner = _dot(x_high, _values(codes >> 4, KIND, ZERO, dtype), inner, PRECISION)
        else:
            inner = _dot(x_low, _values(codes, KIND, ZERO, dtype), inner, PRECISION)
        group = (start // GROUP).to(tl.int64) * num_outputs + output
        if not IS_ONE_GROUP:
            scale = tl.load(scales_ptr + group, in_width, other=0.0).to(tl.float32) * UNIT
            part = inner.to(tl.float32) * scale[None, :]
            if X_GROUP > 0 and X_GROUP < INPUTS:
                part *= tl.load(x_scales + start // X_GROUP, in_rows, other=0.0)[:, None]
            sums += part
        if HAS_MINIMUMS:
            minimum = tl.load(minimums_ptr + group, in_width, other=0.0).to(tl.float32)
            total = tl.sum(x_low.to(tl.float32), 1)
            if PER == 16:
                total += tl.sum(x_high.to(tl.float32), 1)
            sums += total[:, None] * minimum[None, :]
    if IS_ONE_GROUP:
        scale = tl.load(scales_ptr + output, in_width, other=0.0).to(tl.float32) * UNIT
        sums += inner.to(tl.float32) * scale[None, :]
    if X_GROUP >= INPUTS:
        sums *= tl.load(x_scales, in_rows, other=0.0)[:, None]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def product(
    x_ptr, x_scales_ptr, codes_ptr, scales_ptr, minimums_ptr, bias_ptr, residual_ptr, out_ptr,
    num_rows, x_stride, out_stride, scale, x_groups,
    WIDTH: tl.constexpr, INPUTS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, X_GROUP: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, NUM_SPLITS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows with some outputs of a matrix; or with NUM_SPLITS over 1, with a part of their inputs.

    out: [num_rows, WIDTH] of any type, (sums + bias) * scale + residual; or float32 [NUM_SPLITS, num_rows, WIDTH].
    """
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    output = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    split = tl.program_id(2)
    in_rows, in_width = row < num_rows, output < WIDTH
    NUM_STEPS: tl.constexpr = (INPUTS + BLOCK_INPUTS - 1) // BLOCK_INPUTS
    sums = coded_sums(
        x_ptr + row[:, None] * x_stride, in_rows, x_scales_ptr + row * x_groups, codes_ptr, scales_ptr, minimums_ptr,
        output, in_width, WIDTH, split * NUM_STEPS // NUM_SPLITS, (split + 1) * NUM_STEPS // NUM_SPLITS,
        INPUTS, KIND, ZERO, UNIT, GROUP, X_GROUP, HAS_MINIMUMS, PRECISION, BLOCK_ROWS, BLOCK_WIDTH, BLOCK_INPUTS,
    )  # fmt: skip
    inside = in_rows[:, None] & in_width[None, :]
    if NUM_SPLITS > 1:
        tl.store(out_ptr + (split.to(tl.int64) * num_rows + row)[:, None] * WIDTH + output[None, :], sums, inside)
    else:
        if HAS_BIAS:
            sums += tl.load(bias_ptr + output, in_width, other=0.0).to(tl.float32)[None, :]
        sums *= scale
        if HAS_RESIDUAL:
            added = residual_ptr + row[:, None] * WIDTH + output[None, :]
            sums += tl.load(added, inside, other=0.0).to(tl.float32)
        out = out_ptr + row[:, None] * out_stride + output[None, :]
        tl.store(out, sums.to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def sum_splits(
    parts_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, out_stride, scale,
    WIDTH: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum what `product` has made of parts of the inputs, in their order, and finish as it does."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < WIDTH
    sums = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        sums += tl.load(parts_ptr + (row + num_rows * split) * WIDTH + output, inside, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + output, inside, other=0.0).to(tl.float32)
    sums *= scale
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + row * WIDTH + output, inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + output, sums.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def code_rows(
    x_ptr, codes_ptr, scales_ptr, x_stride, num_groups,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr, IS_FLOAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round one group of a row to codes of 8 bits whose largest is MOST, with the scale that its inputs share."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = group * GROUP + tl.arange(0, BLOCK)
    inside = (tl.arange(0, BLOCK) < GROUP) & (place < INPUTS)
    x = tl.load(x_ptr + row * x_stride + place, inside, other=0.0).to(tl.float32)
    spoilt = tl.sum(tl.where(tl.abs(x) < float("inf"), 0.0, float("nan")), 0)  # codes have no NaN and no infinity
    scale = tl.maximum(tl.max(tl.abs(x), 0) / MOST, 1e-30) + spoilt
    tl.store(scales_ptr + row * num_groups + group, scale)
    values = tl.minimum(tl.maximum(x / scale, -MOST), MOST)
    spacing = tl.full((BLOCK,), 1.0, tl.float32)
    if IS_FLOAT:  # eighths of the power of two below, or of the least one
        power = tl.maximum(tl.abs(values), 0.015625).to(tl.int32, bitcast=True) & 0x7F800000
        spacing = power.to(tl.float32, bitcast=True) * 0.125
    middle = spacing * 12582912.0  # where float32 has this spacing
    values = (values + middle) - middle
    if IS_FLOAT:
        bits = (values * 0.00390625).to(tl.float16).to(tl.uint16, bitcast=True)
        codes = (((bits >> 8) & 128) | ((bits >> 7) & 127)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        codes = values.to(tl.int8)
    tl.store(codes_ptr + row * INPUTS + place, codes, inside)
