"""Writing new K and V into pages, after norm and rotation; digests of pages; RMS normalization and the gated unit."""

import triton
import triton.language as tl

from pdserve.kernels.device.codes import magnitudes, row_codes, row_scales


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


@triton.jit
def _normed(a, b, weight_ptr, eps, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Normalize heads, of which a and b are the halves in float32."""
    half: tl.constexpr = HEAD_DIM // 2
    channel = tl.arange(0, BLOCK_HALF)
    inverse = (1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps))[:, None]
    a = a * inverse * tl.load(weight_ptr + channel, channel < half, other=0.0).to(tl.float32)[None, :]
    b = b * inverse * tl.load(weight_ptr + half + channel, channel < half, other=0.0).to(tl.float32)[None, :]
    return a, b


@triton.jit
def _turned(
    row_ptr, heads, valid, weight_ptr, eps, angles_ptr,
    HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, HAS_NORM: tl.constexpr, NORM_AFTER: tl.constexpr,
):  # fmt: skip
    """Load heads of one token, normalize and rotate them, or the other way round.

    Returns both halves of each head in float32, and where they are. Channel i is rotated with channel
    i + HEAD_DIM/2. heads: element offsets [HEADS].
    """
    half: tl.constexpr = HEAD_DIM // 2
    channel = tl.arange(0, BLOCK_HALF)
    in_half = valid[:, None] & (channel < half)[None, :]
    row = row_ptr + heads[:, None] + channel[None, :]
    a = tl.load(row, in_half, other=0.0).to(tl.float32)
    b = tl.load(row + half, in_half, other=0.0).to(tl.float32)
    if HAS_NORM and not NORM_AFTER:
        a, b = _normed(a, b, weight_ptr, eps, HEAD_DIM, BLOCK_HALF)
    cos = tl.load(angles_ptr + channel, channel < half, other=1.0)[None, :]
    sin = tl.load(angles_ptr + half + channel, channel < half, other=0.0)[None, :]
    a, b = a * cos - b * sin, b * cos + a * sin
    if NORM_AFTER:
        a, b = _normed(a, b, weight_ptr, eps, HEAD_DIM, BLOCK_HALF)
    return a, b, channel, in_half


@triton.jit
def rope_write(
    q_ptr, k_ptr, v_ptr, out_ptr, k_pages_ptr, v_pages_ptr, cos_sin_ptr, positions_ptr, slots_ptr,
    q_weight_ptr, k_weight_ptr, eps, num_heads, num_kv_heads, num_slots,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    out_token_stride, out_head_stride, k_page_stride, k_page_head_stride, k_slot_stride,
    v_page_stride, v_page_head_stride, v_slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_NORM: tl.constexpr, NORM_AFTER: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Finish one token's q, k and v: q to `out`, k and v to the token's slot. Grid: (tokens, q then kv head blocks).

    With a CODE, rows of pages are bytes: codes, then their scale.
    """
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = tl.cdiv(num_heads, HEADS)
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        a, b, channel, in_half = _turned(
            q_ptr + token * q_token_stride, head * q_head_stride, head < num_heads, q_weight_ptr, eps, angles,
            HEAD_DIM, BLOCK_HALF, HAS_NORM, NORM_AFTER)  # fmt: skip
        out = out_ptr + token * out_token_stride + (head * out_head_stride)[:, None] + channel[None, :]
        tl.store(out, a.to(out_ptr.dtype.element_ty), in_half)
        tl.store(out + half, b.to(out_ptr.dtype.element_ty), in_half)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        valid = head < tl.where(slot < num_slots, num_kv_heads, 0)
        page, place = slot // PAGE_SIZE, slot % PAGE_SIZE
        a, b, channel, in_half = _turned(
            k_ptr + token * k_token_stride, head * k_head_stride, valid, k_weight_ptr, eps, angles,
            HEAD_DIM, BLOCK_HALF, HAS_NORM, NORM_AFTER)  # fmt: skip
        whole = tl.arange(0, BLOCK_V)
        in_head = valid[:, None] & (whole < V_DIM)[None, :]
        v = tl.load(
            v_ptr + token * v_token_stride + (head * v_head_stride)[:, None] + whole[None, :], in_head, other=0.0
        )
        k_row = k_pages_ptr + page * k_page_stride + place * k_slot_stride + head * k_page_head_stride
        v_row = v_pages_ptr + page * v_page_stride + place * v_slot_stride + head * v_page_head_stride
        if CODE == "":
            k_values = k_row[:, None] + channel[None, :]
            tl.store(k_values, a.to(k_pages_ptr.dtype.element_ty), in_half)
            tl.store(k_values + half, b.to(k_pages_ptr.dtype.element_ty), in_half)
            tl.store(v_row[:, None] + whole[None, :], v.to(v_pages_ptr.dtype.element_ty), in_head)
        else:  # of the values that pages without codes have
            a = a.to(k_ptr.dtype.element_ty).to(tl.float32)
            b = b.to(k_ptr.dtype.element_ty).to(tl.float32)
            most = tl.maximum(tl.max(magnitudes(a), 1), tl.max(magnitudes(b), 1))
            scale = row_scales(most, CODE)
            k_values = k_row[:, None] + channel[None, :]
            tl.store(k_values, row_codes(a, scale[:, None], CODE), in_half)
            tl.store(k_values + half, row_codes(b, scale[:, None], CODE), in_half)
            tl.store((k_row + HEAD_DIM).to(tl.pointer_type(tl.float32)), scale, valid)
            v = v.to(tl.float32)
            scale = row_scales(tl.max(magnitudes(v), 1), CODE)
            tl.store(v_row[:, None] + whole[None, :], row_codes(v, scale[:, None], CODE), in_head)
            tl.store((v_row + V_DIM).to(tl.pointer_type(tl.float32)), scale, valid)


@triton.jit(do_not_specialize=["first_word"])
def digest_pages(
    out_ptr, words_ptr, page_ids_ptr, page_stride, num_words, first_word, BLOCK: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """Add the hash of TURNS * BLOCK words of one page to its digest. Grid: (pages, word blocks). out starts at 0."""
    entry = tl.program_id(0)
    words = words_ptr + tl.load(page_ids_ptr + entry).to(tl.int64) * page_stride
    total = tl.zeros([BLOCK], tl.uint64)
    for turn in range(TURNS):
        index = (tl.program_id(1) * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + index, index < num_words, other=0).to(tl.uint64, bitcast=True)
        z = word + (index + first_word + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = z ^ (z >> 31)
        total += tl.where(index < num_words, z, z - z)
    tl.atomic_add(out_ptr + entry, tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")
