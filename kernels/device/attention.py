"""Flash attention over paged K and V: one work item is some queries of one sequence against a range of its keys.

Prefill and decode are this kernel with different tiles. The query heads that share a K/V head are packed into the
rows of one tile, so K and V are read once for all of them. Method: FlashAttention-2 (Dao 2023) with the split over
keys of Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); `attention_plan.py` decides the items.
"""

import triton
import triton.language as tl

from pdserve.kernels.device.codes import row_numbers

# Columns of an item (see attention_plan.py).
FIRST_PAGE = tl.constexpr(0)
Q_START = tl.constexpr(1)
Q_COUNT = tl.constexpr(2)
Q_POSITION = tl.constexpr(3)
KV_BEGIN = tl.constexpr(4)
KV_END = tl.constexpr(5)
PARTIAL = tl.constexpr(6)
NUM_SPLITS = tl.constexpr(7)
ITEM_FIELDS = tl.constexpr(8)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _multiply(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in float32. "ieee" multiplies float32 operands, which the interpreter needs for bf16 too."""
    if PRECISION == "ieee":
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _pages_at(table, start, last_page, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Look up the page(s) of BLOCK_N positions: one id if a page holds the tile, else one id per position."""
    index = start // PAGE_SIZE if PAGE_SIZE >= BLOCK_N else (start + tl.arange(0, BLOCK_N)) // PAGE_SIZE
    return tl.load(table + tl.minimum(index, last_page))


@triton.jit
def _load_tile(
    source, kv_head, page, start, kv_end, page_stride, slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load K or V of positions start..start+BLOCK_N as [BLOCK_N, BLOCK_D]; what lies past kv_end reads as zero.

    `source` is a tensor descriptor of the pool with USE_TMA, else a pointer to this head's first page.
    """
    row = tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_D)
    valid = ((start + row) < kv_end)[:, None] & (channel < HEAD_DIM)[None, :]
    if USE_TMA:
        tile = source.load([page, kv_head, start % PAGE_SIZE, 0]).reshape([BLOCK_N, BLOCK_D])
        if MASKED:
            tile = tl.where(valid, tile, 0.0)
    else:
        if PAGE_SIZE >= BLOCK_N:
            source += page.to(tl.int64) * page_stride + (start % PAGE_SIZE) * slot_stride
            offsets = row[:, None] * slot_stride + channel[None, :]
        else:
            rows = page.to(tl.int64) * page_stride + ((start + row) % PAGE_SIZE) * slot_stride
            offsets = rows[:, None] + channel[None, :]
        if MASKED:
            tile = tl.load(source + offsets, valid, other=0)
        elif HEAD_DIM == BLOCK_D:
            tile = tl.load(source + offsets)
        else:
            tile = tl.load(source + offsets, (channel < HEAD_DIM)[None, :], other=0)
    return tile


@triton.jit
def _numbers(
    codes, scales, page, start, kv_end, page_stride, slot_stride,
    CODE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return a tile of codes as numbers, and what they are to be multiplied with, [BLOCK_N].

    `scales` points to the scale of this head's first row.
    """
    row = tl.arange(0, BLOCK_N)
    if PAGE_SIZE >= BLOCK_N:
        scales += page.to(tl.int64) * page_stride + (start % PAGE_SIZE) * slot_stride
        rows = row * slot_stride
    else:
        rows = page.to(tl.int64) * page_stride + ((start + row) % PAGE_SIZE) * slot_stride
    words = (scales + rows).to(tl.pointer_type(tl.float32))
    scale = tl.load(words, (start + row) < kv_end, other=0.0) if MASKED else tl.load(words)
    return row_numbers(codes, CODE, dtype), scale * 256.0 if CODE == "fp8_e4m3" else scale


@triton.jit
def _attend_range(
    acc, total, peak, q, q_tail, q_position, begin, end, kv_end, last_page,
    k_source, v_source, kv_head, table, page_stride, slot_stride,
    score_scale, score_cap, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
    CODE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold keys begin..end into (acc, total, peak). Unless MASKED, every row sees all of them.

    Scales of coded rows multiply scores and weights. Numbers of V are bfloat16, unless queries are float32: weights
    times scales may be too small for float16.
    """
    factor = score_cap if HAS_CAP else score_scale
    v_dtype: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.bfloat16
    page = _pages_at(table, begin, last_page, PAGE_SIZE, BLOCK_N)
    # Beside 64 wide rows, addresses that are kept from turn to turn would spill.
    keeps_none: tl.constexpr = TAIL > 0 and q.shape[0] >= 64
    for tile_start in tl.range(begin, end, BLOCK_N, disable_licm=keeps_none):
        start = tl.multiple_of(tile_start, BLOCK_N)
        k = _load_tile(k_source, kv_head, page, start, kv_end, page_stride, slot_stride,
                       HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, USE_TMA, MASKED)  # fmt: skip
        if TAIL > 0:
            v = k
            tail = _load_tile(v_source, kv_head, page, start, kv_end, page_stride, slot_stride,
                              TAIL, BLOCK_T, PAGE_SIZE, BLOCK_N, USE_TMA, MASKED)  # fmt: skip
        else:
            v = _load_tile(v_source, kv_head, page, start, kv_end, page_stride, slot_stride,
                           HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, USE_TMA, MASKED)  # fmt: skip
        if CODE != "":
            k, k_scale = _numbers(k, k_source + HEAD_DIM, page, start, kv_end, page_stride, slot_stride,
                                  CODE, PAGE_SIZE, BLOCK_N, MASKED, q.dtype)  # fmt: skip
            v, v_scale = _numbers(v, v_source + HEAD_DIM, page, start, kv_end, page_stride, slot_stride,
                                  CODE, PAGE_SIZE, BLOCK_N, MASKED, v_dtype)  # fmt: skip
        # The next tile's page id is fetched one turn early: its address is needed before its data can be.
        page = _pages_at(table, start + BLOCK_N, last_page, PAGE_SIZE, BLOCK_N)
        scores = _multiply(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32), PRECISION)
        if TAIL > 0:
            scores = _multiply(q_tail, tl.trans(tail), scores, PRECISION)
        if CODE != "":
            scores *= k_scale[None, :]
        if HAS_CAP:
            scores = 1.0 - 2.0 / (tl.exp2(scores * score_scale) + 1.0)
        if MASKED:
            position = start + tl.arange(0, BLOCK_N)
            visible = (position[None, :] <= q_position[:, None]) & (position < kv_end)[None, :]
            if HAS_WINDOW:
                visible = visible & (position[None, :] > q_position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        # A row may have seen no key yet: its peak is -inf, and -inf - -inf would be NaN.
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        weights = tl.exp2(scores * factor - reference[:, None])
        shrink = tl.exp2(peak - reference)
        total = total * shrink + tl.sum(weights, 1)
        if CODE != "":
            weights *= v_scale[None, :]
        acc = _multiply(weights.to(v.dtype), v, acc * shrink[:, None], PRECISION)
        peak = new_peak
    return acc, total, peak


@triton.jit
def _no_keys(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return (acc, total, peak) of rows that have seen no key."""
    return (
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
    )


@triton.jit
def _whole_tiles(
    first, q_count, kv_begin, kv_end, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """Return the range of keys that every row sees and that tiles of BLOCK_N cut evenly; only its edges need a mask."""
    end = tl.maximum(tl.minimum(kv_end, first + 1) // BLOCK_N * BLOCK_N, kv_begin)
    begin = kv_begin
    if HAS_WINDOW:
        oldest = tl.maximum(first + q_count - window, kv_begin)  # the last query's oldest key
        begin = tl.minimum((oldest + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
    return begin, end


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, partial_ptr, lse_ptr, items_ptr, pages_ptr,
    q_token_stride, q_head_stride, page_stride, head_stride, slot_stride,
    out_token_stride, out_head_stride,
    score_scale, score_cap, window, num_kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS_INNER: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr, CODE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute one item for one K/V head; a split item leaves (normalized partial, log2 of its weight) to `combine`.

    Row r of the tile is query r // GROUP and head r % GROUP of the group. score_scale, or
    with HAS_CAP score_cap, includes log2(e). With HAS_SINKS each head's sink, a score without a value, joins the sum of
    weights where the last of them is known: here, or in `combine`.

    Of latent rows (TAIL > 0), k is the first HEAD_DIM features, which are the value, too, and v the TAIL ones behind
    them, which count in scores alone. Then a "K/V head" is a block of the heads, which all see the same rows.

    Strides of pages are in units of UNIT elements. With a CODE, rows are bytes: codes, then their scale.
    """
    page_stride, head_stride, slot_stride = page_stride * UNIT, head_stride * UNIT, slot_stride * UNIT
    kv_head, item = tl.program_id(1 - HEADS_INNER), tl.program_id(HEADS_INNER)
    fields = items_ptr + item * ITEM_FIELDS
    q_count = tl.load(fields + Q_COUNT)
    if q_count == 0:  # a captured grid is as large as its largest step
        return
    q_start, first = tl.load(fields + Q_START), tl.load(fields + Q_POSITION)
    kv_begin, kv_end = tl.load(fields + KV_BEGIN), tl.load(fields + KV_END)
    table = pages_ptr + tl.load(fields + FIRST_PAGE)
    last_page = (kv_end - 1) // PAGE_SIZE

    heads = q_ptr + kv_head * GROUP * q_head_stride
    q = _load_queries(heads, q_start, q_count, q_token_stride, q_head_stride,
                      GROUP, HEAD_DIM, BLOCK_D, BLOCK_M)  # fmt: skip
    q_tail = q
    if TAIL > 0:
        q_tail = _load_queries(heads + HEAD_DIM, q_start, q_count, q_token_stride, q_head_stride,
                               GROUP, TAIL, BLOCK_T, BLOCK_M)  # fmt: skip
    q_position = first + tl.minimum(tl.arange(0, BLOCK_M) // GROUP, q_count - 1)
    k_source, v_source = k_ptr, v_ptr
    page_head = kv_head if TAIL == 0 else 0
    if not USE_TMA:
        k_source, v_source = k_ptr + page_head * head_stride, v_ptr + page_head * head_stride
    acc, total, peak = _no_keys(BLOCK_M, BLOCK_D)

    begin, end = _whole_tiles(first, q_count, kv_begin, kv_end, window, BLOCK_N, HAS_WINDOW)
    if HAS_WINDOW:
        acc, total, peak = _attend_range(
            acc, total, peak, q, q_tail, q_position, kv_begin, begin, kv_end, last_page, k_source, v_source, page_head,
            table, page_stride, slot_stride, score_scale, score_cap, window,
            HEAD_DIM, BLOCK_D, TAIL, BLOCK_T, PAGE_SIZE, BLOCK_N, HAS_WINDOW, HAS_CAP, PRECISION, USE_TMA, CODE, True,
        )  # fmt: skip
    acc, total, peak = _attend_range(
        acc, total, peak, q, q_tail, q_position, begin, end, kv_end, last_page, k_source, v_source, page_head, table,
        page_stride, slot_stride, score_scale, score_cap, window,
        HEAD_DIM, BLOCK_D, TAIL, BLOCK_T, PAGE_SIZE, BLOCK_N, HAS_WINDOW, HAS_CAP, PRECISION, USE_TMA, CODE, False,
    )  # fmt: skip
    acc, total, peak = _attend_range(
        acc, total, peak, q, q_tail, q_position, end, kv_end, kv_end, last_page, k_source, v_source, page_head, table,
        page_stride, slot_stride, score_scale, score_cap, window,
        HEAD_DIM, BLOCK_D, TAIL, BLOCK_T, PAGE_SIZE, BLOCK_N, HAS_WINDOW, HAS_CAP, PRECISION, USE_TMA, CODE, True,
    )  # fmt: skip
    slot, num_splits = tl.load(fields + PARTIAL), tl.load(fields + NUM_SPLITS)
    if num_splits == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP)
            total += tl.exp2(sink * LOG2_E - peak)
        _store_whole(out_ptr + kv_head * GROUP * out_head_stride, q_start, q_count, out_token_stride, out_head_stride,
                     acc, total, GROUP, HEAD_DIM)  # fmt: skip
    else:
        rows = (slot * num_kv_heads + kv_head).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        _store_partial(partial_ptr, lse_ptr, rows, q_count * GROUP, acc, total, peak, HEAD_DIM)


@triton.jit
def _load_queries(
    source, q_start, q_count, token_stride, head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Load an item's queries as [BLOCK_M, BLOCK_D]; `source` is the first head of the group. The rest reads as zero."""
    row, channel = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = row // GROUP
    rows = (q_start + token).to(tl.int64) * token_stride + row % GROUP * head_stride
    real = (token < q_count)[:, None] & (channel < HEAD_DIM)[None, :]
    return tl.load(source + rows[:, None] + channel[None, :], real, other=0.0)


@triton.jit
def _store_whole(
    target, q_start, q_count, token_stride, head_stride, acc, total, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Store the results of an item that has all of its queries' keys; `target` is the first head of the group."""
    row, channel = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    token = row // GROUP
    rows = (q_start + token).to(tl.int64) * token_stride + row % GROUP * head_stride
    real = (token < q_count)[:, None] & (channel < HEAD_DIM)[None, :]
    out = acc / total[:, None]
    tl.store(target + rows[:, None] + channel[None, :], out.to(target.dtype.element_ty), real)


@triton.jit
def _store_partial(partial_ptr, lse_ptr, rows, num_rows, acc, total, peak, HEAD_DIM: tl.constexpr):
    """Leave a split's normalized result and the log2 of its weight; a row that sees none of its keys has no weight."""
    row, channel = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    real = (row < num_rows)[:, None] & (channel < HEAD_DIM)[None, :]
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(partial_ptr + rows[:, None] * HEAD_DIM + channel[None, :], acc / total[:, None], real)
    tl.store(lse_ptr + rows, peak + tl.log2(total), row < num_rows)


@triton.jit
def combine(
    sinks_ptr, out_ptr, partial_ptr, lse_ptr, combines_ptr, out_token_stride, out_head_stride, num_kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one query and head, each weighted by 2^lse. Grid: (combines, kv heads, rows)."""
    entry, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_start, q_count = tl.load(combines_ptr + entry * 4), tl.load(combines_ptr + entry * 4 + 1)
    if row >= q_count * GROUP:
        return
    first, num_splits = tl.load(combines_ptr + entry * 4 + 2), tl.load(combines_ptr + entry * 4 + 3)
    channel = tl.arange(0, BLOCK_D)
    in_head = channel < HEAD_DIM
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    peak = float("-inf")
    for begin in range(0, num_splits, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        used = split < num_splits
        rows = ((first + split) * num_kv_heads + kv_head).to(tl.int64) * BLOCK_M + row
        lse = tl.load(lse_ptr + rows, used, other=float("-inf"))
        parts = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + channel[None, :],
                        used[:, None] & in_head[None, :], other=0.0)  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lse - reference)
        shrink = tl.exp2(peak - reference)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        peak = new_peak
    out = out_ptr + (q_start + row // GROUP).to(tl.int64) * out_token_stride
    head = kv_head * GROUP + row % GROUP
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head) * LOG2_E - peak)
    tl.store(out + head * out_head_stride + channel, (acc / total).to(out_ptr.dtype.element_ty), in_head)
