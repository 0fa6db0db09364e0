"""Sample one token per row of logits: penalties, truncation and noise in one launch, without sorting.

The tokens top-k, top-p and min-p keep are always those at or above some logit. So the noisy argmax over a larger set
is the answer if it is itself kept; if not, nothing at or below its logit is, and the search goes on above it.
"""

import triton
import triton.language as tl

from pdserve.sampling import GREEDY_BELOW as _GREEDY_BELOW

GREEDY_BELOW = tl.constexpr(_GREEDY_BELOW)


@triton.jit
def _lowbias32(x):
    """Scramble uint32, as rng._lowbias32 does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(ids, low, high):
    """The noise of rng.gumbel for token ids, from a row's two key words."""
    bits = _lowbias32(_lowbias32(ids.to(tl.uint32) ^ low) + high)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    series = (u * 0.3333333333333333 + 0.5) * u
    series = (series + 1.0) * u
    exponential = tl.where(u < 0.0009765625, series, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def _load_scores(row_ptr, start, vocab_size, divisor, BLOCK: tl.constexpr):
    """Load BLOCK logits over the temperature; what is not there, or not a number, is -inf."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + ids, ids < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.math.div_rn(x, divisor)
    return ids, tl.where(x == x, x, float("-inf"))


@triton.jit
def _ordered(x):
    """Map float32 to uint32 so that larger floats get larger integers."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _kth_largest(row_ptr, vocab_size, divisor, k, BLOCK: tl.constexpr):
    """Find the k-th largest score, as its _ordered integer: four turns of a radix search."""
    prefix = tl.full([], 0, tl.uint32)
    remaining = k
    digits = tl.arange(0, 256)
    for turn in tl.static_range(4):
        shift = 24 - 8 * turn
        counts = tl.zeros([256], tl.int32)
        outside = 0
        for start in range(0, vocab_size, BLOCK):
            ids, x = _load_scores(row_ptr, start, vocab_size, divisor, BLOCK)
            key = _ordered(x)
            inside = ids < vocab_size
            if turn > 0:
                inside = inside & (key >> (shift + 8) == prefix)
            digit = (key >> shift & 255).to(tl.int32)
            counts += tl.histogram(tl.where(inside, digit, 0), 256)
            outside += tl.sum(tl.where(inside, 0, 1), 0)
        counts = tl.where(digits == 0, counts - outside, counts)
        at_least = tl.cumsum(counts, 0, reverse=True)
        chosen = tl.sum((at_least >= remaining).to(tl.int32), 0) - 1
        remaining = remaining - tl.sum(tl.where(digits > chosen, counts, 0), 0)
        prefix = (prefix << 8) | chosen.to(tl.uint32)
    return prefix


@triton.jit
def _noisy_argmax(row_ptr, vocab_size, divisor, floor, pivot, low, high, greedy, BLOCK: tl.constexpr):
    """Find the token of score + noise, largest, among scores >= floor and > pivot; ties go to the lowest id."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_score = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.arange(0, BLOCK)
    for start in range(0, vocab_size, BLOCK):
        ids, x = _load_scores(row_ptr, start, vocab_size, divisor, BLOCK)
        noisy = x + tl.where(greedy, 0.0, _gumbel(ids, low, high))
        noisy = tl.where((x >= floor) & (x > pivot), noisy, float("-inf"))
        better = noisy > best
        best = tl.where(better, noisy, best)
        best_score = tl.where(better, x, best_score)
        best_id = tl.where(better, ids, best_id)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, best_id, 2147483647), 0)
    return token, tl.max(tl.where(best_id == token, best_score, float("-inf")), 0)


@triton.jit
def _peak(row_ptr, vocab_size, divisor, BLOCK: tl.constexpr):
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        _, x = _load_scores(row_ptr, start, vocab_size, divisor, BLOCK)
        peak = tl.maximum(peak, x)
    return tl.max(peak, 0)


@triton.jit
def _mass(row_ptr, vocab_size, divisor, peak, floor, pivot, BLOCK: tl.constexpr):
    """Sum exp(score - peak) over scores >= floor and > pivot."""
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        _, x = _load_scores(row_ptr, start, vocab_size, divisor, BLOCK)
        mass += tl.where((x >= floor) & (x > pivot), tl.exp(x - peak), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def count_ids(counts_ptr, ids_ptr, offsets_ptr, counts_stride, OUTPUT: tl.constexpr, BLOCK: tl.constexpr):
    """Note one row's token ids: 2 is added for each id of the output, the lowest bit set for ids of the prompt."""
    row = tl.program_id(0)
    end = tl.load(offsets_ptr + row + 1)
    for start in range(tl.load(offsets_ptr + row), end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + place, place < end, other=0).to(tl.int64)
        target = counts_ptr + row.to(tl.int64) * counts_stride + ids
        if OUTPUT:
            tl.atomic_add(target, 2, place < end, sem="relaxed")
        else:
            tl.atomic_or(target, 1, place < end, sem="relaxed")


@triton.jit
def _penalize(
    row_ptr, logits_row, counts_row, bias_ids_ptr, bias_ptr, bias_begin, bias_end, mask_row, is_masked,
    repetition, frequency, presence, vocab_size, HAS_COUNTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the row's penalized, masked and biased logits to row_ptr, in float32."""
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_row + ids, ids < vocab_size, other=0.0).to(tl.float32)
        if HAS_COUNTS:
            count = tl.load(counts_row + ids, ids < vocab_size, other=0)
            seen = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
            x = tl.where(count > 0, seen, x)
            written = (count >> 1).to(tl.float32)
            x = x - frequency * written
            x = x - tl.where(written > 0, presence, 0.0)
        if HAS_MASK:
            word = tl.where(is_masked, tl.load(mask_row + (ids >> 5), ids < vocab_size, other=-1), -1)
            x = tl.where((word >> (ids & 31)) & 1 == 1, x, float("-inf"))
        tl.store(row_ptr + ids, x, ids < vocab_size)
    tl.debug_barrier()  # other threads of this program read what was just written
    if HAS_BIAS:
        for start in range(bias_begin, bias_end, BIAS_BLOCK):
            place = start + tl.arange(0, BIAS_BLOCK)
            ids = tl.load(bias_ids_ptr + place, place < bias_end, other=vocab_size)
            real = (ids >= 0) & (ids < vocab_size)  # beside the row lie its neighbours
            bias = tl.load(bias_ptr + place, real, other=0.0)
            tl.store(row_ptr + ids, tl.load(row_ptr + ids, real, other=0.0) + bias, real)
        tl.debug_barrier()


@triton.jit
def sample(
    out_ptr, logits_ptr, scratch_ptr, keys_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    repetition_ptr, frequency_ptr, presence_ptr, counts_ptr, bias_ids_ptr, bias_ptr, bias_offsets_ptr,
    mask_ptr, mask_rows_ptr, vocab_size, logits_stride, scratch_stride, counts_stride, mask_stride,
    HAS_COUNTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
    BIAS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Sample the token of one row. Grid: (rows,). scratch, float32, is used where logits have to be changed first."""
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    if HAS_COUNTS or HAS_BIAS or HAS_MASK:
        bias_begin, bias_end, mask = 0, 0, -1
        if HAS_BIAS:
            bias_begin, bias_end = tl.load(bias_offsets_ptr + row), tl.load(bias_offsets_ptr + row + 1)
        if HAS_MASK:
            mask = tl.load(mask_rows_ptr + row)
        scores = scratch_ptr + wide * scratch_stride
        _penalize(scores, logits_ptr + wide * logits_stride, counts_ptr + wide * counts_stride, bias_ids_ptr, bias_ptr,
                  bias_begin, bias_end, mask_ptr + tl.maximum(mask, 0) * mask_stride, mask >= 0,
                  tl.load(repetition_ptr + row), tl.load(frequency_ptr + row), tl.load(presence_ptr + row),
                  vocab_size, HAS_COUNTS, HAS_BIAS, HAS_MASK, BLOCK, BIAS_BLOCK)  # fmt: skip
    else:
        scores = logits_ptr + wide * logits_stride

    temperature = tl.load(temperature_ptr + row)
    greedy = temperature < GREEDY_BELOW
    divisor = tl.where(greedy, 1.0, temperature)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    low = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
    high = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)

    peak = float("-inf")
    floor = float("-inf")
    allowed = float("inf")  # mass that may lie above a kept token, in units of exp(-peak)
    if (top_p < 1.0 or min_p > 0.0) and not greedy:
        peak = _peak(scores, vocab_size, divisor, BLOCK)
    if top_k > 0 and top_k < vocab_size and not greedy:
        key = _kth_largest(scores, vocab_size, divisor, top_k, BLOCK)
        key = tl.where(key >> 31 == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF)
        floor = key.to(tl.float32, bitcast=True)
    if top_p < 1.0 and not greedy:
        allowed = top_p * _mass(scores, vocab_size, divisor, peak, floor, float("-inf"), BLOCK)
    if min_p > 0.0 and not greedy:
        floor = tl.maximum(floor, peak + tl.log(min_p))

    token, score = _noisy_argmax(scores, vocab_size, divisor, floor, float("-inf"), low, high, greedy, BLOCK)
    if top_p < 1.0 and not greedy:
        above = _mass(scores, vocab_size, divisor, peak, float("-inf"), score, BLOCK)
        while above >= allowed and score < peak:
            token, score = _noisy_argmax(scores, vocab_size, divisor, floor, score, low, high, greedy, BLOCK)
            above = _mass(scores, vocab_size, divisor, peak, float("-inf"), score, BLOCK)
    tl.store(out_ptr + row, token.to(tl.int64))
