"""Sample one token per row of logits: penalties, truncation and noise in two launches, without sorting.

`scan` looks at a part of a row: it finds the part's largest score plus noise. `choose` takes the largest of a row's
parts, which is the token unless top-k, top-p or min-p leave it out. The tokens that those keep are always those at or
above some score. So the noisy argmax over a larger set is the answer if it is itself kept; if not, nothing at or below
its score is, and the search goes on above it. The search skips parts that have no score so high. What a row does not
ask for is skipped by branches at run time.
"""

import triton
import triton.language as tl

from pdserve.protocol.sampling import GREEDY_BELOW as _GREEDY_BELOW

GREEDY_BELOW = tl.constexpr(_GREEDY_BELOW)
LOWEST = tl.constexpr(-3.4e38)  # for a part that has no finite score: exp of what is not a number is none


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
def _load_scores(row_ptr, part, vocab_size, BLOCK: tl.constexpr):
    """Load the BLOCK scores of a part; past the vocabulary they are -inf."""
    ids = part * BLOCK + tl.arange(0, BLOCK)
    return ids, tl.load(row_ptr + ids, ids < vocab_size, other=float("-inf"))


@triton.jit
def _ordered(x):
    """Map float32 to uint32 so that larger floats get larger integers."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _kth_largest(row_ptr, peaks_ptr, num_parts, vocab_size, k, bound, BLOCK: tl.constexpr):
    """Find the k-th largest score, as its _ordered integer: four turns of a radix search. It is at least `bound`."""
    prefix = tl.full([], 0, tl.uint32)
    remaining = k
    digits = tl.arange(0, 256)
    for turn in tl.static_range(4):
        shift = 24 - 8 * turn
        counts = tl.zeros([256], tl.int32)
        outside = 0
        for part in range(num_parts):
            if tl.load(peaks_ptr + part) >= bound:
                ids, x = _load_scores(row_ptr, part, vocab_size, BLOCK)
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
def _best(noisy, scores, ids):
    """Return the largest noisy score, its token and that token's score; ties go to the lowest id."""
    top = tl.max(noisy, 0)
    token = tl.min(tl.where(noisy == top, ids, 2147483647), 0)
    return top, token, tl.max(tl.where(ids == token, scores, float("-inf")), 0)


@triton.jit
def _noisy_argmax(row_ptr, peaks_ptr, num_parts, vocab_size, floor, pivot, low, high, BLOCK: tl.constexpr):
    """Find the token of score + noise, largest, among scores >= floor and > pivot, and its score."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_score = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.arange(0, BLOCK)
    for part in range(num_parts):
        peak = tl.load(peaks_ptr + part)
        if (peak >= floor) & (peak > pivot):
            ids, x = _load_scores(row_ptr, part, vocab_size, BLOCK)
            noisy = tl.where((x >= floor) & (x > pivot), x + _gumbel(ids, low, high), float("-inf"))
            better = noisy > best
            best = tl.where(better, noisy, best)
            best_score = tl.where(better, x, best_score)
            best_id = tl.where(better, ids, best_id)
    _, token, score = _best(best, best_score, best_id)
    return token, score


@triton.jit
def _mass(row_ptr, peaks_ptr, num_parts, vocab_size, peak, floor, pivot, BLOCK: tl.constexpr):
    """Sum exp(score - peak) over scores >= floor and > pivot."""
    mass = tl.zeros([BLOCK], tl.float32)
    for part in range(num_parts):
        part_peak = tl.load(peaks_ptr + part)
        if (part_peak >= floor) & (part_peak > pivot):
            _, x = _load_scores(row_ptr, part, vocab_size, BLOCK)
            mass += tl.where((x >= floor) & (x > pivot), tl.exp(x - peak), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def count_ids(
    counts_ptr, slots_ptr, is_output_ptr, ids_ptr, offsets_ptr, counts_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Note one list of token ids in its row: 2 is added for each id of an output, the lowest bit set for a prompt's."""
    place = tl.program_id(0)
    row_ptr = counts_ptr + tl.load(slots_ptr + place).to(tl.int64) * counts_stride
    is_output = tl.load(is_output_ptr + place) != 0
    end = tl.load(offsets_ptr + place + 1)
    for start in range(tl.load(offsets_ptr + place), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        target = row_ptr + tl.load(ids_ptr + at, at < end, other=0)
        if is_output:
            tl.atomic_add(target, 2, at < end, sem="relaxed")
        else:
            tl.atomic_or(target, 1, at < end, sem="relaxed")


@triton.jit
def _penalized(x, count, repetition, frequency, presence):
    """Apply penalties to logits, by what `count_ids` has noted."""
    seen = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
    x = tl.where(count > 0, seen, x)
    written = (count >> 1).to(tl.float32)
    x = x - frequency * written
    return x - tl.where(written > 0, presence, 0.0)


@triton.jit
def _biased(x, row_ptr, ids, start, stop, bias_ids_ptr, bias_ptr, begin, end, BIAS_BLOCK: tl.constexpr):
    """Add the biases of tokens from `start` up to `stop`, through memory at row_ptr."""
    tl.store(row_ptr + ids, x, ids < stop)
    tl.debug_barrier()  # other threads of this program change what was just written
    for first in range(begin, end, BIAS_BLOCK):
        place = first + tl.arange(0, BIAS_BLOCK)
        biased = tl.load(bias_ids_ptr + place, place < end, other=stop)
        real = (biased >= start) & (biased < stop)
        bias = tl.load(bias_ptr + place, real, other=0.0)
        tl.store(row_ptr + biased, tl.load(row_ptr + biased, real, other=0.0) + bias, real)
    tl.debug_barrier()
    return tl.load(row_ptr + ids, ids < stop, other=float("-inf"))


@triton.jit
def _is_truncated(top_k, top_p, min_p, vocab_size):
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit(do_not_specialize=["counts_stride", "mask_stride"])
def scan(
    best_ptr, token_ptr, logits_ptr, scores_ptr, keys_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    repetition_ptr, frequency_ptr, presence_ptr, slots_ptr, counts_ptr, bias_ids_ptr, bias_ptr, bias_offsets_ptr,
    mask_ptr, mask_rows_ptr, vocab_size, num_parts, logits_stride, scores_stride, counts_stride, mask_stride,
    BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Find one part's best token, and that token's score with and without noise.

    Grid: (rows, parts of BLOCK tokens). best: float32 [rows, 4, num_parts]; token: int32 [rows, num_parts]. Of rows
    that are truncated, the part's largest score, the sum of exp(score - largest) and all scores are written, too.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    wide, start = row.to(tl.int64), part * BLOCK
    stop = tl.minimum(start + BLOCK, vocab_size)
    ids = start + tl.arange(0, BLOCK)
    scores_row = scores_ptr + wide * scores_stride
    best_row = best_ptr + wide * 4 * num_parts + part
    x = tl.load(logits_ptr + wide * logits_stride + ids, ids < stop, other=float("-inf")).to(tl.float32)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        count = tl.load(counts_ptr + slot.to(tl.int64) * counts_stride + ids, ids < stop, other=0)
        x = _penalized(x, count, tl.load(repetition_ptr + row), tl.load(frequency_ptr + row),
                       tl.load(presence_ptr + row))  # fmt: skip
    mask = tl.load(mask_rows_ptr + row)
    if mask >= 0:
        word = tl.load(mask_ptr + mask.to(tl.int64) * mask_stride + (ids >> 5), ids < stop, other=0)
        x = tl.where((word >> (ids & 31)) & 1 == 1, x, float("-inf"))
    begin, end = tl.load(bias_offsets_ptr + row), tl.load(bias_offsets_ptr + row + 1)
    if begin < end:
        x = _biased(x, scores_row, ids, start, stop, bias_ids_ptr, bias_ptr, begin, end, BIAS_BLOCK)

    x = tl.where(x == x, x, float("-inf"))  # what is not a number is never sampled

    temperature = tl.load(temperature_ptr + row)
    noisy = x
    if temperature >= GREEDY_BELOW:
        x = tl.math.div_rn(x, temperature)
        low = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
        high = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
        noisy = x + _gumbel(ids, low, high)
        if _is_truncated(tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row), vocab_size):
            tl.store(scores_row + ids, x, ids < stop)
            peak = tl.max(x, 0)
            tl.store(best_row + 2 * num_parts, peak)
            tl.store(best_row + 3 * num_parts, tl.sum(tl.exp(x - tl.maximum(peak, LOWEST)), 0))
    top, token, score = _best(noisy, x, ids)
    tl.store(best_row, top)
    tl.store(best_row + num_parts, score)
    tl.store(token_ptr + wide * num_parts + part, token)


@triton.jit(do_not_specialize=["counts_stride"])
def choose(
    out_ptr, best_ptr, token_ptr, scores_ptr, keys_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    slots_ptr, counts_ptr, vocab_size, num_parts, scores_stride, counts_stride,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Choose one row's token from what `scan` found, and count it where the row has counts. Grid: (rows,)."""
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    part = tl.arange(0, PARTS)
    best_row, real = best_ptr + wide * 4 * num_parts + part, part < num_parts
    best = tl.load(best_row, real, other=float("-inf"))
    best_score = tl.load(best_row + num_parts, real, other=float("-inf"))
    ids = tl.load(token_ptr + wide * num_parts + part, real, other=2147483647)
    top, token, score = _best(best, best_score, ids)

    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    is_drawn = (tl.load(temperature_ptr + row) >= GREEDY_BELOW) & (top > float("-inf"))  # else there is no score at all
    if is_drawn and _is_truncated(top_k, top_p, min_p, vocab_size):
        scores = scores_ptr + wide * scores_stride
        low = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
        high = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
        peaks_ptr = best_ptr + (wide * 4 + 2) * num_parts
        peaks = tl.load(peaks_ptr + part, real, other=float("-inf"))
        peak = tl.max(peaks, 0)
        floor = float("-inf")
        allowed = float("inf")  # mass that may lie above a kept token, in units of exp(-peak)
        if top_k > 0 and top_k < vocab_size:
            num_higher = tl.sum((peaks[None, :] > peaks[:, None]).to(tl.int32), 1)
            bound = tl.min(tl.where(num_higher < top_k, peaks, float("inf")), 0)  # top_k parts, or all, reach it
            key = _kth_largest(scores, peaks_ptr, num_parts, vocab_size, top_k, bound, BLOCK)
            key = tl.where(key >> 31 == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF)
            floor = key.to(tl.float32, bitcast=True)
            if top_p < 1.0:
                allowed = top_p * _mass(scores, peaks_ptr, num_parts, vocab_size, peak, floor, float("-inf"), BLOCK)
        elif top_p < 1.0:
            masses = tl.load(best_row + 3 * num_parts, real, other=0.0)
            allowed = top_p * tl.sum(masses * tl.exp(peaks - peak), 0)
        if min_p > 0.0:
            floor = tl.maximum(floor, peak + tl.log(min_p))
        if score < floor:
            token, score = _noisy_argmax(scores, peaks_ptr, num_parts, vocab_size, floor, float("-inf"), low, high,
                                         BLOCK)  # fmt: skip
        if top_p < 1.0:
            above = _mass(scores, peaks_ptr, num_parts, vocab_size, peak, float("-inf"), score, BLOCK)
            while above >= allowed and score < peak:
                token, score = _noisy_argmax(scores, peaks_ptr, num_parts, vocab_size, floor, score, low, high, BLOCK)
                above = _mass(scores, peaks_ptr, num_parts, vocab_size, peak, float("-inf"), score, BLOCK)
    tl.store(out_ptr + row, token.to(tl.int64))
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        counted = counts_ptr + slot.to(tl.int64) * counts_stride + token
        tl.store(counted, tl.load(counted) + 2)
