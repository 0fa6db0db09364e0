"""Recurrences over states in pages, of long prompts: blocks of tokens are computed at once, by products of matrices.

Within a block, what tokens bring is summed up as in attention, with products of q and k in which the decays between two
tokens are factors (Mamba-2: Dao, Gu 2024, section 6). Gated delta nets correct what they recall: there a triangular
matrix is inverted first, so that what a block learns is a product, too (the WY representation and UT transform of Yang,
Wang, Zhang, Shen, Kim 2024, with the gates of Yang, Kautz, Hatamizadeh 2024). Only memories pass from block to block.

Decays of several tokens are sums of logarithms that are at most 0, never differences of such sums. Those lose what
a weak gate leaves behind a strong one.

Blocks end where pages end. Tokens that a block lacks have keys and values of 0, and a decay of 0.
"""

import triton
import triton.language as tl

from pdserve.kernels.device.states import BEFORE, LENGTH_EPS, PIECE, TOKEN_FIELDS, sigmoid, softplus

PRECISION = tl.constexpr("tf32x3")  # of products: tensor cores compute float32 in three products
SOLVED = tl.constexpr(16)  # rows of the parts on the diagonal that are inverted row by row


@triton.jit
def _multiplied(a, b):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _row_in(weights, rows, row):
    """Return the products of one row of each matrix with a matrix: [n, m, m] and [n, m, m] to [n, 1, m]."""
    chosen = tl.sum(tl.where((tl.arange(0, SOLVED) == row)[None, :, None], weights, 0.0), 1)
    return tl.sum(chosen[:, :, None] * rows, 1)[:, None, :]


@triton.jit
def _inverse(lower, BLOCK: tl.constexpr):
    """Invert 1 + lower, where lower [BLOCK, BLOCK] has zeros on and above its diagonal.

    Parts of SOLVED rows on the diagonal are solved for row by row. With them as D, the inverse is (1 + N)^-1 D, where N
    is D times what is left of lower. N is nilpotent: of four parts (1 - N) (1 + N^2) is that inverse.
    """
    COUNT: tl.constexpr = BLOCK // SOLVED
    tl.static_assert(COUNT <= 4)
    place, part = tl.arange(0, BLOCK), tl.arange(0, COUNT)
    own = (place // SOLVED)[:, None] == part[None, :]
    near = -tl.sum(tl.where(own[:, :, None], tl.reshape(lower, [BLOCK, COUNT, SOLVED]), 0.0), 1)
    near = tl.reshape(near, [COUNT, SOLVED, SOLVED])
    solved = near
    for row in range(2, SOLVED):
        is_row = (tl.arange(0, SOLVED) == row)[None, :, None]
        solved = tl.where(is_row, solved + _row_in(near, solved, row), solved)
    solved = tl.reshape(solved, [BLOCK, 1, SOLVED])
    inverse = tl.reshape(tl.where(own[:, :, None], solved, 0.0), [BLOCK, BLOCK])
    inverse += tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    far = tl.where((place // SOLVED)[:, None] > (place // SOLVED)[None, :], lower, 0.0)
    beyond = _multiplied(inverse, far)
    inverse += _multiplied(beyond, _multiplied(beyond, inverse))
    return inverse - _multiplied(beyond, inverse)


@triton.jit
def _loaded(row_ptr, place, feature, count, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Load features [BLOCK, features] of the tokens of a block; zeros where there is no token, or no such feature."""
    real = (place < count)[:, None] & (feature < WIDTH)[None, :]
    return tl.load(row_ptr + place[:, None] * STRIDE + feature[None, :], real, other=0.0)


@triton.jit
def within_blocks(
    convolved_ptr, taken_ptr, changes_ptr, products_ptr, rate_ptr, rate_bias_ptr, blocks_ptr,
    taken_stride, q_at, k_at, rates_at, betas_at,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Compute one head's products of each token of a block with those before it, and with itself.

    products: of each token [products, HEADS, BLOCK]: how much of what each token has learnt it reads; with CORRECTS
    then what it learns of what each token lacks. changes: k and decays, as `recur` leaves them. KEYS: features of keys
    that are multiplied at once. Grid: (blocks, heads).
    """
    block, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(blocks_ptr + 2 * block).to(tl.int64)
    count = tl.load(blocks_ptr + 2 * block + 1) - begin
    place, feature = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    real, later = place < count, place[:, None] > place[None, :]
    width: tl.constexpr = GROUPS * KEY_DIM + HEADS * (VALUE_DIM + 1)
    rows: tl.constexpr = HEADS * (2 if CORRECTS else 1)
    at_group = head // (HEADS // GROUPS) * KEY_DIM
    q_ptr = convolved_ptr + begin * CHANNELS + q_at + at_group
    k_ptr = convolved_ptr + begin * CHANNELS + k_at + at_group
    taken = taken_ptr + begin * taken_stride + place * taken_stride
    given = tl.load(taken + rates_at + head, real, other=0.0).to(tl.float32) + tl.load(rate_bias_ptr + head)
    decay = tl.where(real, tl.load(rate_ptr + head) * softplus(given), 0.0)
    changes_ptr += begin * width
    tl.store(changes_ptr + place * width + GROUPS * KEY_DIM + HEADS * VALUE_DIM + head, decay, real)
    products = tl.zeros([BLOCK, BLOCK], tl.float32)
    q_squares, k_squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, KEY_DIM, KEYS):
        q = _loaded(q_ptr, place, first + feature, count, CHANNELS, KEY_DIM)
        k = _loaded(k_ptr, place, first + feature, count, CHANNELS, KEY_DIM)
        products += _multiplied(q, tl.trans(k))
        if CORRECTS:
            q_squares += tl.sum(q * q, 1)
            k_squares += tl.sum(k * k, 1)
    k_scale = tl.full([BLOCK], 1.0, tl.float32)
    if CORRECTS:
        k_scale = 1.0 / tl.sqrt(k_squares + LENGTH_EPS)
        products *= (KEY_DIM**-0.5 / tl.sqrt(q_squares + LENGTH_EPS))[:, None] * k_scale[None, :]
    left = tl.exp(tl.cumsum(tl.where(later, decay[:, None], 0.0), 0))
    products = tl.where(place[:, None] >= place[None, :], products * left, 0.0)
    products_ptr += (begin * rows + head) * BLOCK
    own = place[:, None] * (rows * BLOCK) + place[None, :]
    tl.store(products_ptr + own, products, real[:, None])
    if CORRECTS:
        alike = tl.zeros([BLOCK, BLOCK], tl.float32)
        for first in range(0, KEY_DIM, KEYS):
            k = _loaded(k_ptr, place, first + feature, count, CHANNELS, KEY_DIM)
            alike += _multiplied(k, tl.trans(k))
        beta = tl.where(real, sigmoid(tl.load(taken + betas_at + head, real, other=0.0).to(tl.float32)), 0.0)
        lower = tl.where(later, alike * left * (beta * k_scale)[:, None] * k_scale[None, :], 0.0)
        tl.store(products_ptr + HEADS * BLOCK + own, _inverse(lower, BLOCK) * beta[None, :], real[:, None])
    if head % (HEADS // GROUPS) == 0:
        for first in range(0, KEY_DIM, KEYS):
            k = _loaded(k_ptr, place, first + feature, count, CHANNELS, KEY_DIM) * k_scale[:, None]
            there = real[:, None] & (first + feature < KEY_DIM)[None, :]
            tl.store(changes_ptr + at_group + place[:, None] * width + first + feature[None, :], k, there)


@triton.jit
def _decays(decays_ptr, place, count, STRIDE: tl.constexpr):
    """Return logarithms of what is left of a memory before the block at each of its tokens, and of each at its end."""
    own = tl.load(decays_ptr + place * STRIDE, place < count, other=0.0)
    behind = tl.load(decays_ptr + (place + 1) * STRIDE, place + 1 < count, other=0.0)
    return tl.cumsum(own, 0), tl.cumsum(behind, 0, reverse=True)


@triton.jit
def _memories(
    pool_ptr, page, memory_at, page_floats, value,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Load columns of a head's memory, in parts of KEYS rows; zeros where there is no page."""
    memories = ()
    for turn in tl.static_range(TURNS):
        key = turn * KEYS + tl.arange(0, KEYS)
        real = (value < VALUE_DIM)[None, :] & (key < tl.where(page >= 0, KEY_DIM, 0))[:, None]
        at = pool_ptr + page * page_floats + memory_at
        part = tl.load(at + key[:, None] * VALUE_DIM + value[None, :], real, other=0.0)
        memories += (part,)  # type: ignore[assignment]
    return memories


@triton.jit
def _after(
    memories, k_ptr, learnt, total, behind, place, count,
    STRIDE: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Return memories behind a block. total: falls from token to token, so its least is that of the whole block."""
    changed = ()
    for turn in tl.static_range(TURNS):
        k = _loaded(k_ptr, place, turn * KEYS + tl.arange(0, KEYS), count, STRIDE, KEY_DIM)
        added = _multiplied(tl.trans(k * tl.exp(behind)[:, None]), learnt)
        changed += (memories[turn] * tl.exp(tl.min(total, 0)) + added,)  # type: ignore[assignment]
    return changed


@triton.jit
def across_blocks(
    convolved_ptr, taken_ptr, out_ptr, changes_ptr, products_ptr, pool_ptr, rate_bias_ptr, direct_ptr,
    tokens_ptr, chunks_ptr, blocks_ptr, taken_stride, page_floats, memory_at, q_at, v_at, rates_at,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, TURNS: tl.constexpr, BLOCK_V: tl.constexpr,
    CORRECTS: tl.constexpr, HAS_DIRECT: tl.constexpr,
):  # fmt: skip
    """Bring a chunk's blocks to some columns of one head's memory; read it into out, as `recur` does token by token.

    products: as `within_blocks` leaves them. changes: with k and decays; what is learnt is added.
    Grid: (long chunks, heads, blocks of columns).
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    place, value = tl.arange(0, BLOCK), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    at_group = head // (HEADS // GROUPS) * KEY_DIM
    width: tl.constexpr = GROUPS * KEY_DIM + HEADS * (VALUE_DIM + 1)
    rows: tl.constexpr = HEADS * (2 if CORRECTS else 1)
    own = place[:, None] * (rows * BLOCK) + place[None, :]
    first, last = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    page = tl.load(tokens_ptr + tl.load(blocks_ptr + 2 * first) * TOKEN_FIELDS + BEFORE).to(tl.int64)
    memory_at += head * KEY_DIM * VALUE_DIM
    memories = _memories(pool_ptr, page, memory_at, page_floats, value, KEY_DIM, VALUE_DIM, KEYS, TURNS)
    for block in range(first, last):
        begin = tl.load(blocks_ptr + 2 * block).to(tl.int64)
        count = tl.load(blocks_ptr + 2 * block + 1) - begin
        real, change_ptr, row_ptr = place < count, changes_ptr + begin * width, convolved_ptr + begin * CHANNELS
        values = real[:, None] & (value < VALUE_DIM)[None, :]
        total, behind = _decays(change_ptr + GROUPS * KEY_DIM + HEADS * VALUE_DIM + head, place, count, width)
        product_ptr = products_ptr + (begin * rows + head) * BLOCK + own
        v = _loaded(row_ptr + v_at + head * VALUE_DIM, place, value, count, CHANNELS, VALUE_DIM)
        if CORRECTS:
            known = tl.zeros([BLOCK, BLOCK_V], tl.float32)
            for turn in tl.static_range(TURNS):
                key = turn * KEYS + tl.arange(0, KEYS)
                k = _loaded(change_ptr + at_group, place, key, count, width, KEY_DIM)
                known += _multiplied(k, memories[turn])
            lacking = v - known * tl.exp(total)[:, None]
            learnt = _multiplied(tl.load(product_ptr + HEADS * BLOCK, real[:, None], other=0.0), lacking)
        else:
            taken = taken_ptr + begin * taken_stride + place * taken_stride
            given = tl.load(taken + rates_at + head, real, other=0.0).to(tl.float32) + tl.load(rate_bias_ptr + head)
            learnt = v * softplus(given)[:, None]
        at = change_ptr + GROUPS * KEY_DIM + head * VALUE_DIM + place[:, None] * width + value[None, :]
        tl.store(at, learnt, values)
        read, squares = tl.zeros([BLOCK, BLOCK_V], tl.float32), tl.zeros([BLOCK], tl.float32)
        for turn in tl.static_range(TURNS):
            key = turn * KEYS + tl.arange(0, KEYS)
            q = _loaded(row_ptr + q_at + at_group, place, key, count, CHANNELS, KEY_DIM)
            read += _multiplied(q, memories[turn])
            squares += tl.sum(q * q, 1)
        grown = tl.exp(total)
        if CORRECTS:
            grown *= KEY_DIM**-0.5 / tl.sqrt(squares + LENGTH_EPS)
        read *= grown[:, None]
        read += _multiplied(tl.load(product_ptr, real[:, None], other=0.0), learnt)
        if HAS_DIRECT:
            v = _loaded(row_ptr + v_at + head * VALUE_DIM, place, value, count, CHANNELS, VALUE_DIM)
            read += tl.load(direct_ptr + head) * v
        at = out_ptr + (begin * HEADS + head) * VALUE_DIM + place[:, None] * (HEADS * VALUE_DIM) + value[None, :]
        tl.store(at, read, values)
        memories = _after(memories, change_ptr + at_group, learnt, total, behind, place, count,
                          width, KEY_DIM, KEYS, TURNS)  # fmt: skip


@triton.jit
def keep_blocks(
    changes_ptr, pool_ptr, tokens_ptr, chunks_ptr, blocks_ptr, pages_ptr,
    changes_stride, page_floats, layer_floats, memory_at,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, TURNS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Change some columns of one head's memory as a chunk's blocks do, and write it where a piece ends.

    changes: of each layer. Grid: (long chunks, layers x heads, blocks of columns).
    """
    chunk, layer, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    place, value = tl.arange(0, BLOCK), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    at_group = head // (HEADS // GROUPS) * KEY_DIM
    width: tl.constexpr = GROUPS * KEY_DIM + HEADS * (VALUE_DIM + 1)
    first, last = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    page = tl.load(tokens_ptr + tl.load(blocks_ptr + 2 * first) * TOKEN_FIELDS + BEFORE).to(tl.int64)
    changes_ptr += layer.to(tl.int64) * changes_stride
    memory_at += layer * layer_floats + head * KEY_DIM * VALUE_DIM
    memories = _memories(pool_ptr, page, memory_at, page_floats, value, KEY_DIM, VALUE_DIM, KEYS, TURNS)
    for block in range(first, last):
        begin, end = tl.load(blocks_ptr + 2 * block).to(tl.int64), tl.load(blocks_ptr + 2 * block + 1)
        count, change_ptr = end - begin, changes_ptr + begin * width
        total, behind = _decays(change_ptr + GROUPS * KEY_DIM + HEADS * VALUE_DIM + head, place, count, width)
        learnt = _loaded(change_ptr + GROUPS * KEY_DIM + head * VALUE_DIM, place, value, count, width, VALUE_DIM)
        memories = _after(memories, change_ptr + at_group, learnt, total, behind, place, count,
                          width, KEY_DIM, KEYS, TURNS)  # fmt: skip
        piece = tl.load(tokens_ptr + (end - 1) * TOKEN_FIELDS + PIECE)
        if piece >= 0:
            after = pool_ptr + tl.load(pages_ptr + piece).to(tl.int64) * page_floats + memory_at
            for turn in tl.static_range(TURNS):
                key = turn * KEYS + tl.arange(0, KEYS)
                there = (key < KEY_DIM)[:, None] & (value < VALUE_DIM)[None, :]
                tl.store(after + key[:, None] * VALUE_DIM + value[None, :], memories[turn], there)
