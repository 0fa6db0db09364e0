"""Rotary positions, with the per-head normalization before them (Qwen 3) and the write into pages after them."""

import triton
import triton.language as tl


@triton.jit
def _turned(
    row_ptr, heads, valid, weight_ptr, eps, angles_ptr,
    HEAD_DIM: tl.constexpr, ROT: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Load heads of one token, normalize, rotate: returns (a, b, rest) in float32 with their channels.

    a and b are the two channels of each rotated pair, rest what is not rotated. heads: element offsets [HEADS].
    """
    half: tl.constexpr = ROT // 2
    pair = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        first, second = pair * 2, pair * 2 + 1
    else:
        first, second = pair, pair + half
    other = ROT + tl.arange(0, BLOCK_REST)
    in_pair = valid[:, None] & (pair < half)[None, :]
    in_rest = valid[:, None] & (other < HEAD_DIM)[None, :]
    a = tl.load(row_ptr + heads[:, None] + first[None, :], in_pair, other=0.0).to(tl.float32)
    b = tl.load(row_ptr + heads[:, None] + second[None, :], in_pair, other=0.0).to(tl.float32)
    rest = tl.load(row_ptr + heads[:, None] + other[None, :], in_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
        inverse = (1.0 / tl.sqrt(square / HEAD_DIM + eps))[:, None]
        a = a * inverse * tl.load(weight_ptr + first, pair < half, other=0.0).to(tl.float32)[None, :]
        b = b * inverse * tl.load(weight_ptr + second, pair < half, other=0.0).to(tl.float32)[None, :]
        rest = rest * inverse * tl.load(weight_ptr + other, other < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    cos = tl.load(angles_ptr + pair, pair < half, other=1.0)[None, :]
    sin = tl.load(angles_ptr + half + pair, pair < half, other=0.0)[None, :]
    return a * cos - b * sin, b * cos + a * sin, rest, first, second, other, in_pair, in_rest


@triton.jit
def rope(
    x_ptr, out_ptr, cos_sin_ptr, positions_ptr, num_heads, x_token_stride, x_head_stride,
    out_token_stride, out_head_stride,
    HEAD_DIM: tl.constexpr, ROT: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token. Grid: (tokens, head blocks). out may be x."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROT
    a, b, rest, first, second, other, in_pair, in_rest = _turned(
        x_ptr + token * x_token_stride, head * x_head_stride, head < num_heads, x_ptr, 0.0, angles,
        HEAD_DIM, ROT, BLOCK_HALF, BLOCK_REST, INTERLEAVED, False)  # fmt: skip
    out = out_ptr + token * out_token_stride + (head * out_head_stride)[:, None]
    dtype = out_ptr.dtype.element_ty
    tl.store(out + first[None, :], a.to(dtype), in_pair)
    tl.store(out + second[None, :], b.to(dtype), in_pair)
    tl.store(out + other[None, :], rest.to(dtype), in_rest)


@triton.jit
def _saturated(values, IS_FP8: tl.constexpr):
    """Clamp to what e4m3 holds, which has no infinity."""
    if IS_FP8:
        values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    return values


@triton.jit
def rope_write(
    q_ptr, k_ptr, v_ptr, out_ptr, k_pages_ptr, v_pages_ptr, cos_sin_ptr, positions_ptr, slots_ptr,
    q_weight_ptr, k_weight_ptr, k_scale_ptr, v_scale_ptr, eps, num_heads, num_kv_heads, num_slots,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    out_token_stride, out_head_stride, k_page_stride, k_page_head_stride, k_slot_stride,
    v_page_stride, v_page_head_stride, v_slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROT: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Finish one token's q, k and v: q to `out`, k and v to the token's slot. Grid: (tokens, q then kv head blocks)."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = tl.cdiv(num_heads, HEADS)
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROT
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        a, b, rest, first, second, other, in_pair, in_rest = _turned(
            q_ptr + token * q_token_stride, head * q_head_stride, head < num_heads, q_weight_ptr, eps, angles,
            HEAD_DIM, ROT, BLOCK_HALF, BLOCK_REST, INTERLEAVED, HAS_NORM)  # fmt: skip
        out = out_ptr + token * out_token_stride + (head * out_head_stride)[:, None]
        tl.store(out + first[None, :], a.to(out_ptr.dtype.element_ty), in_pair)
        tl.store(out + second[None, :], b.to(out_ptr.dtype.element_ty), in_pair)
        tl.store(out + other[None, :], rest.to(out_ptr.dtype.element_ty), in_rest)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        valid = head < tl.where(slot < num_slots, num_kv_heads, 0)
        page, place = slot // PAGE_SIZE, slot % PAGE_SIZE
        a, b, rest, first, second, other, in_pair, in_rest = _turned(
            k_ptr + token * k_token_stride, head * k_head_stride, valid, k_weight_ptr, eps, angles,
            HEAD_DIM, ROT, BLOCK_HALF, BLOCK_REST, INTERLEAVED, HAS_NORM)  # fmt: skip
        channel = tl.arange(0, BLOCK_D)
        in_head = valid[:, None] & (channel < HEAD_DIM)[None, :]
        v = tl.load(v_ptr + token * v_token_stride + (head * v_head_stride)[:, None] + channel[None, :], in_head,
                    other=0.0).to(tl.float32)  # fmt: skip
        if IS_FP8:
            k_unit = 1.0 / tl.load(k_scale_ptr + head, valid, other=1.0)[:, None]
            a, b, rest = a * k_unit, b * k_unit, rest * k_unit
            v = v / tl.load(v_scale_ptr + head, valid, other=1.0)[:, None]
        k_row = k_pages_ptr + page * k_page_stride + place * k_slot_stride + (head * k_page_head_stride)[:, None]
        tl.store(k_row + first[None, :], _saturated(a, IS_FP8).to(k_pages_ptr.dtype.element_ty), in_pair)
        tl.store(k_row + second[None, :], _saturated(b, IS_FP8).to(k_pages_ptr.dtype.element_ty), in_pair)
        tl.store(k_row + other[None, :], _saturated(rest, IS_FP8).to(k_pages_ptr.dtype.element_ty), in_rest)
        v_row = v_pages_ptr + page * v_page_stride + place * v_slot_stride + (head * v_page_head_stride)[:, None]
        tl.store(v_row + channel[None, :], _saturated(v, IS_FP8).to(v_pages_ptr.dtype.element_ty), in_head)
