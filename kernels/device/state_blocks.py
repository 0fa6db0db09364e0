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

from pdserve.kernels.device.states import BEFORE, LENGTH_EPS, PIECE, TOKEN_FIELDS, memory_before, sigmoid, softplus

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
    begin, end = tl.load(blocks_ptr + 2 * block), tl.load(blocks_ptr + 2 * block + 1)
    place, feature = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    real = place < end - begin
    token = begin.to(tl.int64) + place
    row, taken = convolved_ptr + token * CHANNELS, taken_ptr + token * taken_stride
    at_group = head // (HEADS // GROUPS) * KEY_DIM
    products = tl.zeros([BLOCK, BLOCK], tl.float32)
    alike = tl.zeros([BLOCK, BLOCK], tl.float32)
    q_squares, k_squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, KEY_DIM, KEYS):
        there = real[:, None] & (first + feature < KEY_DIM)[None, :]
        q = tl.load(row[:, None] + q_at + at_group + first + feature[None, :], there, other=0.0)
        k = tl.load(row[:, None] + k_at + at_group + first + feature[None, :], there, other=0.0)
        products += _multiplied(q, tl.trans(k))
        if CORRECTS:
            alike += _multiplied(k, tl.trans(k))
            q_squares += tl.sum(q * q, 1)
            k_squares += tl.sum(k * k, 1)
    given = tl.load(taken + rates_at + head, real, other=0.0).to(tl.float32) + tl.load(rate_bias_ptr + head)
    decay = tl.where(real, tl.load(rate_ptr + head) * softplus(given), 0.0)
    later = place[:, None] > place[None, :]
    left = tl.exp(tl.cumsum(tl.where(later, decay[:, None], 0.0), 0))
    change = changes_ptr + token * (GROUPS * KEY_DIM + HEADS * (VALUE_DIM + 1))
    tl.store(change + GROUPS * KEY_DIM + HEADS * VALUE_DIM + head, decay, real)
    own = products_ptr + (token[:, None] * HEADS + head) * BLOCK + place[None, :]
    k_scale = tl.full([BLOCK], 1.0, tl.float32)
    if CORRECTS:
        own = products_ptr + (token[:, None] * 2 * HEADS + head) * BLOCK + place[None, :]
        k_scale = 1.0 / tl.sqrt(k_squares + LENGTH_EPS)
        q_scale = KEY_DIM**-0.5 / tl.sqrt(q_squares + LENGTH_EPS)
        products *= q_scale[:, None] * k_scale[None, :]
        beta = tl.where(real, sigmoid(tl.load(taken + betas_at + head, real, other=0.0).to(tl.float32)), 0.0)
        lower = tl.where(later, alike * left * (beta * k_scale)[:, None] * k_scale[None, :], 0.0)
        tl.store(own + HEADS * BLOCK, _inverse(lower, BLOCK) * beta[None, :], real[:, None])
    tl.store(own, tl.where(place[:, None] >= place[None, :], products * left, 0.0), real[:, None])
    if head % (HEADS // GROUPS) == 0:
        for first in range(0, KEY_DIM, KEYS):
            there = real[:, None] & (first + feature < KEY_DIM)[None, :]
            k = tl.load(row[:, None] + k_at + at_group + first + feature[None, :], there, other=0.0)
            tl.store(change[:, None] + at_group + first + feature[None, :], k * k_scale[:, None], there)


@triton.jit
def _decays(decays, place, real, length, stride):
    """Return how much is left of a memory before the block at each of its tokens, and of each token at its end."""
    own = tl.load(decays, real, other=0.0)
    behind = tl.load(decays + stride, place + 1 < length, other=0.0)
    return tl.cumsum(own, 0), tl.cumsum(behind, 0, reverse=True)


@triton.jit
def across_blocks(
    convolved_ptr, taken_ptr, out_ptr, changes_ptr, products_ptr, pool_ptr, rate_bias_ptr, direct_ptr,
    tokens_ptr, chunks_ptr, blocks_ptr, taken_stride, page_floats, memory_at, q_at, v_at, rates_at,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CORRECTS: tl.constexpr, HAS_DIRECT: tl.constexpr,
):  # fmt: skip
    """Bring a chunk's blocks to some columns of one head's memory; read it into out, as `recur` does token by token.

    products: as `within_blocks` leaves them. changes: with k and decays; what is learnt is added.
    Grid: (long chunks, heads, blocks of columns).
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value, place = key < KEY_DIM, value < VALUE_DIM, tl.arange(0, BLOCK)
    at_group = head // (HEADS // GROUPS) * KEY_DIM
    width: tl.constexpr = GROUPS * KEY_DIM + HEADS * (VALUE_DIM + 1)
    first, last = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    page = tl.load(tokens_ptr + tl.load(blocks_ptr + 2 * first) * TOKEN_FIELDS + BEFORE).to(tl.int64)
    memory = memory_before(pool_ptr, page, memory_at + head * KEY_DIM * VALUE_DIM, page_floats,
                           key[:, None] * VALUE_DIM + value[None, :], is_key, is_value, KEY_DIM, BLOCK_K)  # fmt: skip
    for block in range(first, last):
        begin, end = tl.load(blocks_ptr + 2 * block), tl.load(blocks_ptr + 2 * block + 1)
        real, token = place < end - begin, begin.to(tl.int64) + place
        row, change = convolved_ptr + token * CHANNELS, changes_ptr + token * width
        keys, values = real[:, None] & is_key[None, :], real[:, None] & is_value[None, :]
        total, behind = _decays(change + GROUPS * KEY_DIM + HEADS * VALUE_DIM + head, place, real, end - begin, width)
        v = tl.load(row[:, None] + v_at + head * VALUE_DIM + value[None, :], values, other=0.0)
        k = tl.load(change[:, None] + at_group + key[None, :], keys, other=0.0)
        own = products_ptr + (token[:, None] * HEADS + head) * BLOCK + place[None, :]
        if CORRECTS:
            own = products_ptr + (token[:, None] * 2 * HEADS + head) * BLOCK + place[None, :]
            lacking = v - _multiplied(k, memory) * tl.exp(total)[:, None]
            learnt = _multiplied(tl.load(own + HEADS * BLOCK, real[:, None], other=0.0), lacking)
        else:
            given = tl.load(taken_ptr + token * taken_stride + rates_at + head, real, other=0.0).to(tl.float32)
            learnt = v * softplus(given + tl.load(rate_bias_ptr + head))[:, None]
        tl.store(change[:, None] + GROUPS * KEY_DIM + head * VALUE_DIM + value[None, :], learnt, values)
        q = tl.load(row[:, None] + q_at + at_group + key[None, :], keys, other=0.0)
        grown = tl.exp(total)
        if CORRECTS:
            grown *= KEY_DIM**-0.5 / tl.sqrt(tl.sum(q * q, 1) + LENGTH_EPS)
        read = _multiplied(q, memory) * grown[:, None]
        read += _multiplied(tl.load(own, real[:, None], other=0.0), learnt)
        if HAS_DIRECT:
            read += tl.load(direct_ptr + head) * v
        tl.store(out_ptr + (token[:, None] * HEADS + head) * VALUE_DIM + value[None, :], read, values)
        memory = _after(memory, k, learnt, total, behind)


@triton.jit
def _after(memory, k, learnt, total, behind):
    """Return a memory behind a block. total: falls from token to token, so its least is that of the whole block."""
    return memory * tl.exp(tl.min(total, 0)) + _multiplied(tl.trans(k * tl.exp(behind)[:, None]), learnt)


@triton.jit
def keep_blocks(
    changes_ptr, pool_ptr, tokens_ptr, chunks_ptr, blocks_ptr, pages_ptr,
    changes_stride, page_floats, layer_floats, memory_at,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Change some columns of one head's memory as a chunk's blocks do, and write it where a piece ends.

    changes: of each layer. Grid: (long chunks, layers x heads, blocks of columns).
    """
    chunk, layer, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    key, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value, place = key < KEY_DIM, value < VALUE_DIM, tl.arange(0, BLOCK)
    within = key[:, None] * VALUE_DIM + value[None, :]
    at_group = head // (HEADS // GROUPS) * KEY_DIM
    width: tl.constexpr = GROUPS * KEY_DIM + HEADS * (VALUE_DIM + 1)
    first, last = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    page = tl.load(tokens_ptr + tl.load(blocks_ptr + 2 * first) * TOKEN_FIELDS + BEFORE).to(tl.int64)
    changes_ptr += layer.to(tl.int64) * changes_stride
    memory_at += layer * layer_floats + head * KEY_DIM * VALUE_DIM
    memory = memory_before(pool_ptr, page, memory_at, page_floats, within, is_key, is_value, KEY_DIM, BLOCK_K)
    for block in range(first, last):
        begin, end = tl.load(blocks_ptr + 2 * block), tl.load(blocks_ptr + 2 * block + 1)
        real, change = place < end - begin, changes_ptr + (begin.to(tl.int64) + place) * width
        total, behind = _decays(change + GROUPS * KEY_DIM + HEADS * VALUE_DIM + head, place, real, end - begin, width)
        k = tl.load(change[:, None] + at_group + key[None, :], real[:, None] & is_key[None, :], other=0.0)
        learnt = tl.load(change[:, None] + GROUPS * KEY_DIM + head * VALUE_DIM + value[None, :],
                         real[:, None] & is_value[None, :], other=0.0)  # fmt: skip
        memory = _after(memory, k, learnt, total, behind)
        piece = tl.load(tokens_ptr + (end - 1) * TOKEN_FIELDS + PIECE)
        if piece >= 0:
            after = pool_ptr + tl.load(pages_ptr + piece).to(tl.int64) * page_floats + memory_at
            tl.store(after + within, memory, is_key[:, None] & is_value[None, :])
