"""Kernels that work row by row: RMS normalization, and the gated unit."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm(
    x_ptr, weight_ptr, out_ptr, num_rows, x_stride, out_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS rows of WIDTH."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, column < WIDTH, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + eps)
    out = x * inverse[:, None] * weight[None, :]
    tl.store(out_ptr + row[:, None] * out_stride + column[None, :], out.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def silu_mul(x_ptr, out_ptr, x_stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write silu(gate) * up; a row of x is WIDTH gates, then WIDTH ups."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(x_ptr + row * x_stride + column, mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + WIDTH + column, mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * up
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask)
