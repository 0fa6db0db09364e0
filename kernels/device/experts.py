"""Products of a mixture's experts, and the sums of what they make.

A slot is a pair of a row and an expert that it has chosen. Slots are in the order of their experts; a block of slots is
of one expert.
"""

import triton
import triton.language as tl

from pdserve.kernels.device.products import coded_sums


@triton.jit
def grouped_product(
    x_ptr, weights_ptr, scales_ptr, minimums_ptr, bias_ptr, out_ptr, rows_ptr, experts_ptr, begins_ptr, ends_ptr,
    num_experts, x_stride, out_stride,
    WIDTH: tl.constexpr, INPUTS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, X_GROUP: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply a block of slots with some outputs of its expert's matrix [WIDTH, INPUTS].

    rows: of x, one for each slot. Blocks past the last one have the expert `num_experts`. KIND: of codes, in one matrix
    of all experts' outputs; "": weights are floats.
    """
    block = tl.program_id(0)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < num_experts:
        slot = tl.load(begins_ptr + block).to(tl.int64) + tl.arange(0, BLOCK_SLOTS)
        in_block = slot < tl.load(ends_ptr + block)
        row = tl.load(rows_ptr + slot, in_block, other=0).to(tl.int64)
        output = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        in_width = output < WIDTH
        if KIND == "":
            weights = weights_ptr + expert * WIDTH * INPUTS + output.to(tl.int64)[None, :] * INPUTS
            sums = tl.zeros((BLOCK_SLOTS, BLOCK_WIDTH), tl.float32)
            for first in range(0, INPUTS, BLOCK_INPUTS):
                place = first + tl.arange(0, BLOCK_INPUTS)
                inside = place < INPUTS
                x = tl.load(
                    x_ptr + row[:, None] * x_stride + place[None, :], in_block[:, None] & inside[None, :], other=0.0
                )
                w = tl.load(weights + place[:, None], inside[:, None] & in_width[None, :], other=0.0)
                if PRECISION == "ieee":
                    sums = tl.dot(x.to(tl.float32), w.to(tl.float32), sums, input_precision="ieee")
                else:
                    sums = tl.dot(x, w, sums)
        else:
            sums = coded_sums(
                x_ptr + row[:, None] * x_stride, in_block, x_ptr, weights_ptr, scales_ptr, minimums_ptr,
                (expert * WIDTH).to(tl.int32) + output, in_width, num_experts * WIDTH,
                0, (INPUTS + BLOCK_INPUTS - 1) // BLOCK_INPUTS,
                INPUTS, KIND, ZERO, UNIT, GROUP, X_GROUP, HAS_MINIMUMS, PRECISION, BLOCK_SLOTS, BLOCK_WIDTH,
                BLOCK_INPUTS,
            )  # fmt: skip
        if HAS_BIAS:
            sums += tl.load(bias_ptr + expert * WIDTH + output, in_width, other=0.0).to(tl.float32)[None, :]
        out = out_ptr + slot[:, None] * out_stride + output[None, :]
        tl.store(out, sums.to(out_ptr.dtype.element_ty), in_block[:, None] & in_width[None, :])


@triton.jit
def sum_slots(
    made_ptr, shares_ptr, places_ptr, shared_ptr, gates_ptr, residual_ptr, out_ptr, scale,
    NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the slots of one row by its shares, in the order of the experts; then what the shared expert has made."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    sums = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        slot = tl.load(places_ptr + row * NUM_CHOSEN + i).to(tl.int64)
        share = tl.load(shares_ptr + row * NUM_CHOSEN + i)
        sums += share * tl.load(made_ptr + slot * WIDTH + column, inside, other=0.0)
    at = row * WIDTH + column
    if HAS_SHARED:
        shared = tl.load(shared_ptr + at, inside, other=0.0).to(tl.float32)
        if HAS_GATES:
            shared *= 1.0 / (1.0 + tl.exp2(tl.load(gates_ptr + row) * -1.4426950408889634))
        sums += shared
    sums *= scale
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + at, inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), inside)
