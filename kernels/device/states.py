"""Recurrences over states in pages: short convolutions (LFM2), gated delta nets (Yang, Kautz, Hatamizadeh 2024) and
Mamba-2 (Dao, Gu 2024). Tokens of a sequence come one after the other, as in steps of single tokens and in short chunks;
`state_blocks.py` computes the heads of long ones.

`keep` alone writes pages. The others leave what it needs: how each token changes the memories, and last inputs.
"""

import triton
import triton.language as tl

# Columns of a token.
PLACE = tl.constexpr(0)  # in its chunk
BEFORE = tl.constexpr(1)  # the page of the state before its chunk; below 0: there is none
PIECE = tl.constexpr(2)  # that ends with it; below 0: none does
TOKEN_FIELDS = tl.constexpr(3)

LENGTH_EPS = tl.constexpr(1e-6)  # of the lengths of q and k


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def convolve(
    x_ptr, out_ptr, inputs_ptr, pool_ptr, weight_ptr, bias_ptr, tokens_ptr,
    x_stride, inputs_stride, page_floats, kept_at, inputs_at, before_at, gates_at,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
    HAS_HEADS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Weigh each feature of a token and of those before it; keep the last inputs where a piece ends.

    With heads, out is the silu of the sums, float32; else they are multiplied with gates, as inputs are. inputs: of
    each piece [KERNEL - 1, CHANNELS]. Grid: (tokens, blocks of channels).
    """
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < CHANNELS
    fields = tokens_ptr + token * TOKEN_FIELDS
    place, page, piece = tl.load(fields + PLACE), tl.load(fields + BEFORE).to(tl.int64), tl.load(fields + PIECE)
    kept = pool_ptr + page * page_floats + kept_at
    keeps = inputs_ptr + piece.to(tl.int64) * inputs_stride
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, real, other=0.0)
    for turn in tl.static_range(KERNEL):
        missing = KERNEL - 1 - turn - place  # above 0: the state has this input
        row = x_ptr + (token - (KERNEL - 1 - turn)) * x_stride
        here = channel < tl.where(missing <= 0, CHANNELS, 0)
        x = tl.load(row + inputs_at + channel, here, other=0.0).to(tl.float32)
        if not HAS_HEADS:
            x *= tl.load(row + before_at + channel, here, other=0.0).to(tl.float32)
            x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        there = channel < tl.where(missing > 0, tl.where(page >= 0, CHANNELS, 0), 0)
        x += tl.load(kept + (KERNEL - 1 - missing) * CHANNELS + channel, there, other=0.0)
        total += x * tl.load(weight_ptr + turn * CHANNELS + channel, real, other=0.0)
        if turn > 0:
            tl.store(keeps + (turn - 1) * CHANNELS + channel, x, channel < tl.where(piece >= 0, CHANNELS, 0))
    if HAS_HEADS:
        total = total * sigmoid(total)
    else:
        gates = tl.load(x_ptr + token * x_stride + gates_at + channel, real, other=0.0).to(tl.float32)
        total = gates * total.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * CHANNELS + channel, total.to(out_ptr.dtype.element_ty), real)


@triton.jit
def _unit(x, length):
    return x * (length / tl.sqrt(tl.sum(x * x, 0) + LENGTH_EPS))


@triton.jit
def _memory_before(
    pool_ptr, page, memory_at, page_floats, within, is_key, is_value, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Load columns of a head's memory [BLOCK_K, BLOCK_V]; zeros where there is no page."""
    real = is_value[None, :] & (tl.arange(0, BLOCK_K) < tl.where(page >= 0, KEY_DIM, 0))[:, None]
    return tl.load(pool_ptr + page * page_floats + memory_at + within, real, other=0.0)


@triton.jit
def _log1p(x):
    """log(1 + x), right where 1 + x is 1, too (Kahan; Goldberg 1991, theorem 4)."""
    one_more = 1.0 + x
    return tl.where(one_more == 1.0, x, tl.log(one_more) * x / tl.where(one_more == 1.0, 1.0, one_more - 1.0))


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, _log1p(tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def recur(
    convolved_ptr, taken_ptr, out_ptr, changes_ptr, pool_ptr, rate_ptr, rate_bias_ptr, direct_ptr,
    tokens_ptr, chunks_ptr, taken_stride, page_floats, memory_at, q_at, k_at, v_at, rates_at, betas_at,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CORRECTS: tl.constexpr, HAS_DIRECT: tl.constexpr,
):  # fmt: skip
    """Bring a chunk's tokens to some columns of one head's memory, and read it into out: float32.

    For each token, memory = exp(decay) * memory + k learnt, where decay is rate * step. The delta rule learns
    beta * (v - k memory), others step * v; it reads q memory. out: [tokens, HEADS, VALUE_DIM].
    changes: of each token k [GROUPS, KEY_DIM], what is learnt [HEADS, VALUE_DIM], decays [HEADS].
    chunks: of each its first token, and the one behind its last. Grid: (chunks, heads, blocks of columns).
    """
    chunk, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key, value = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    within = key[:, None] * VALUE_DIM + value[None, :]
    shared: tl.constexpr = HEADS // GROUPS
    at_group = head // shared * KEY_DIM
    begin, end = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    page = tl.load(tokens_ptr + begin * TOKEN_FIELDS + BEFORE).to(tl.int64)
    memory = _memory_before(pool_ptr, page, memory_at + head * KEY_DIM * VALUE_DIM, page_floats, within,
                            is_key, is_value, KEY_DIM, BLOCK_K)  # fmt: skip
    rate, rate_bias = tl.load(rate_ptr + head), tl.load(rate_bias_ptr + head)
    says_key = key < tl.where((head % shared == 0) & (block == 0), KEY_DIM, 0)
    for place in range(end - begin):
        token = begin.to(tl.int64) + place
        row, taken = convolved_ptr + token * CHANNELS, taken_ptr + token * taken_stride
        q = tl.load(row + q_at + at_group + key, is_key, other=0.0)
        k = tl.load(row + k_at + at_group + key, is_key, other=0.0)
        v = tl.load(row + v_at + head * VALUE_DIM + value, is_value, other=0.0)
        given = tl.load(taken + rates_at + head).to(tl.float32) + rate_bias
        step = softplus(given)
        decay = rate * step
        memory *= tl.exp(decay)
        if CORRECTS:
            q, k = _unit(q, KEY_DIM**-0.5), _unit(k, 1.0)
            beta = sigmoid(tl.load(taken + betas_at + head).to(tl.float32))
            learnt = beta * (v - tl.sum(memory * k[:, None], 0))
        else:
            learnt = step * v
        memory = tl.fma(k[:, None], learnt[None, :], memory)  # as `keep` rounds it
        read = tl.sum(memory * q[:, None], 0)
        if HAS_DIRECT:
            read += tl.load(direct_ptr + head) * v
        tl.store(out_ptr + (token * HEADS + head) * VALUE_DIM + value, read, is_value)
        change = changes_ptr + token * (GROUPS * KEY_DIM + HEADS * (VALUE_DIM + 1))
        tl.store(change + at_group + key, k, says_key)
        tl.store(change + GROUPS * KEY_DIM + head * VALUE_DIM + value, learnt, is_value)
        tl.store(change + GROUPS * KEY_DIM + HEADS * VALUE_DIM + head, decay, block == 0)


@triton.jit
def gate(
    made_ptr, taken_ptr, out_ptr, norm_ptr, taken_stride, gates_at, eps, scale,
    WIDTH: tl.constexpr, PART: tl.constexpr, NORM_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, GATES_FIRST: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Normalize each part of a row, where there is a norm, and multiply with the silu of gates, before it or behind it.

    Grid: (tokens, parts of a row).
    """
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    real, at = column < PART, tl.program_id(1) * PART + column
    x = tl.load(made_ptr + token * WIDTH + at, real, other=0.0)
    given = tl.load(taken_ptr + token * taken_stride + gates_at + at, real, other=0.0).to(tl.float32)
    gates = given * sigmoid(given)
    if GATES_FIRST or not HAS_NORM:
        x *= gates
    if HAS_NORM:
        x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / PART + eps)
        weight = tl.load(norm_ptr + at % NORM_WIDTH, real, other=0.0).to(tl.float32)
        if ROUNDS:
            x = (x.to(out_ptr.dtype.element_ty).to(tl.float32) * weight).to(out_ptr.dtype.element_ty).to(tl.float32)
        else:
            x *= weight
        if not GATES_FIRST:
            x *= gates
    x = x.to(out_ptr.dtype.element_ty).to(tl.float32) * scale
    tl.store(out_ptr + token * WIDTH + at, x.to(out_ptr.dtype.element_ty), real)


@triton.jit
def keep(
    changes_ptr, pool_ptr, tokens_ptr, chunks_ptr, pages_ptr, changes_stride, page_floats, layer_floats, memory_at,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Change some columns of one head's memory as a chunk's tokens do, and write it where a piece that is kept ends.

    changes: of each layer as `recur` leaves them. Grid: (chunks, layers x heads, blocks of columns).
    """
    chunk, layer, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    key, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    within = key[:, None] * VALUE_DIM + value[None, :]
    at_group = head // (HEADS // GROUPS) * KEY_DIM
    begin, end = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    page = tl.load(tokens_ptr + begin * TOKEN_FIELDS + BEFORE).to(tl.int64)
    changes = changes_ptr + layer.to(tl.int64) * changes_stride
    memory_at += layer * layer_floats + head * KEY_DIM * VALUE_DIM
    memory = _memory_before(pool_ptr, page, memory_at, page_floats, within, is_key, is_value, KEY_DIM, BLOCK_K)
    for place in range(end - begin):
        token = begin.to(tl.int64) + place
        change = changes + token * (GROUPS * KEY_DIM + HEADS * (VALUE_DIM + 1))
        k = tl.load(change + at_group + key, is_key, other=0.0)
        learnt = tl.load(change + GROUPS * KEY_DIM + head * VALUE_DIM + value, is_value, other=0.0)
        left = tl.exp(tl.load(change + GROUPS * KEY_DIM + HEADS * VALUE_DIM + head))
        memory = tl.fma(k[:, None], learnt[None, :], memory * left)
        piece = tl.load(tokens_ptr + token * TOKEN_FIELDS + PIECE)
        if piece >= 0:
            kept = tl.load(pages_ptr + piece).to(tl.int64)  # below 0: it is not
            after = pool_ptr + kept * page_floats + memory_at
            tl.store(after + within, memory, is_key[:, None] & (value < tl.where(kept >= 0, VALUE_DIM, 0))[None, :])
