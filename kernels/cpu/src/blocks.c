/* Attention of chunks of more than one token over a pool of pages, in bfloat16, by dot products of pairs. Codes of K and
 * V are numbers that bfloat16 holds; scales of K multiply scores, those of V weights.
 *
 * A unit is a block of TOKENS queries of one chunk, with all heads that share one KV head. It goes over its keys in
 * blocks of KEYS positions, which begin at multiples of KEYS. For each query it keeps the largest score so far, the sum
 * of weights and the weighted sum of values (the online softmax of FlashAttention, Dao et al. 2022). Keys that a query
 * does not see change none of these. So a query's result depends on its own sequence alone, not on how the sequence was
 * cut into chunks. */

#define OWN_WIDTH

#include "attention.h"

#define TOKENS 32
#define KEYS 64
#define ROWS 4 /* queries that one stream of keys or values serves at once */
#if defined(__AVX512F__) || defined(__aarch64__)
#define VECTORS 4 /* of each query that are summed at once: ROWS * VECTORS of 32 registers */
#else
#define VECTORS 2 /* of 16 registers */
#endif

typedef struct {
    float peaks[TOKENS];
    floats totals[TOKENS]; /* of every LANES-th key */
} state;

#if defined(__AVX512BW__)

/* The pairs of 16 keys as columns: to[pair * KEYS + key]. */
INLINE void transpose_pairs(uint32_t *to, const char *const *keys, int64_t offset) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++)
        a[i] = _mm512_loadu_si512(keys[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int half = 0; half < 2; half++) {
            a[i + 2 * half] = _mm512_unpacklo_epi64(b[i + half], b[i + 2 + half]);
            a[i + 2 * half + 1] = _mm512_unpackhi_epi64(b[i + half], b[i + 2 + half]);
        }
    for (int column = 0; column < 4; column++) {
        __m512i even = _mm512_shuffle_i32x4(a[column], a[4 + column], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(a[column], a[4 + column], 0xdd);
        __m512i later_even = _mm512_shuffle_i32x4(a[8 + column], a[12 + column], 0x88);
        __m512i later_odd = _mm512_shuffle_i32x4(a[8 + column], a[12 + column], 0xdd);
        _mm512_storeu_si512(to + column * KEYS, _mm512_shuffle_i32x4(even, later_even, 0x88));
        _mm512_storeu_si512(to + (column + 4) * KEYS, _mm512_shuffle_i32x4(odd, later_odd, 0x88));
        _mm512_storeu_si512(to + (column + 8) * KEYS, _mm512_shuffle_i32x4(even, later_even, 0xdd));
        _mm512_storeu_si512(to + (column + 12) * KEYS, _mm512_shuffle_i32x4(odd, later_odd, 0xdd));
    }
}

/* Values of two keys side by side: to[pair of keys * dim + dimension]. */
INLINE void interleave_values(uint32_t *to, const char *const *keys, int64_t offset, int64_t dim) {
    const __m512i upper = _mm512_set1_epi32(16), step = _mm512_set1_epi32(0x00200000);
    const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i first = _mm512_or_si512(_mm512_or_si512(count, _mm512_slli_epi32(count, 16)), step);
    const __m512i last = _mm512_or_si512(_mm512_or_si512(first, upper), _mm512_slli_epi32(upper, 16));
    for (int64_t pair = 0; pair < KEYS / 2; pair++)
        for (int64_t d = 0; d < dim; d += 32) {
            __m512i x = _mm512_loadu_si512(keys[2 * pair] + offset + 2 * d);
            __m512i y = _mm512_loadu_si512(keys[2 * pair + 1] + offset + 2 * d);
            _mm512_storeu_si512(to + pair * dim + d, _mm512_permutex2var_epi16(x, first, y));
            _mm512_storeu_si512(to + pair * dim + d + 16, _mm512_permutex2var_epi16(x, last, y));
        }
}

#else

INLINE void transpose_pairs(uint32_t *to, const char *const *keys, int64_t offset) {
    for (int key = 0; key < 16; key++)
        for (int pair = 0; pair < 16; pair++)
            memcpy(to + pair * KEYS + key, keys[key] + offset + 4 * pair, 4);
}

INLINE void interleave_values(uint32_t *to, const char *const *keys, int64_t offset, int64_t dim) {
    for (int64_t pair = 0; pair < KEYS / 2; pair++) {
        const uint16_t *x = (const uint16_t *)(keys[2 * pair] + offset), *y = (const uint16_t *)(keys[2 * pair + 1] + offset);
        for (int64_t d = 0; d < dim; d++)
            to[pair * dim + d] = x[d] | (uint32_t)y[d] << 16;
    }
}

#endif

/* Adds to sums[row][vector] the products of `count` pairs of each row with columns: [count][stride]. */
INLINE void multiply_pairs(
    floats sums[ROWS][VECTORS], const element *const *rows, const uint32_t *columns, int64_t stride, int64_t count,
    int vectors
) {
    for (int64_t pair = 0; pair < count; pair++) {
        pairs column[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            column[v] = load_pairs_once(columns + pair * stride + LANES * v);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            pairs both = splat_pair(rows[r] + 2 * pair);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sums[r][v] = add_products(sums[r][v], column[v], both);
        }
    }
}

/* Stores weights as elements, and returns what bfloat16 holds of them. */
INLINE floats store_rounded(element *to, floats weights) {
#if defined(__AVX512BF16__)
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)weights); /* none is below what a normal number can be */
    memcpy(to, &rounded, sizeof rounded);
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)rounded), 16);
#else
    floats rounded = rounded_to(weights, BFLOAT16);
    store(to, 0, rounded, ELEMENT);
    return rounded;
#endif
}

INLINE floats first_lane(float value) {
    floats lanes = splat(0.0f);
    lanes[0] = value;
    return lanes;
}

/* Turns scores of one query into weights that bfloat16 holds, with zeros for keys before `begin` and from `end` on.
 * Returns what its sums so far are to be multiplied with. */
INLINE float weigh_keys(
    element *weights, floats *scores, const struct step *step, int64_t begin, int64_t end, float *peak, floats *total
) {
    const float scale = (float)step->scale, cap = (float)step->soft_cap;
    floats most = splat(-INFINITY), sum = splat(0.0f);
    for (int v = 0; v < KEYS / LANES; v++)
        scores[v] = cap > 0 ? soft_capped(scores[v] * scale, cap) : scores[v] * scale;
    if (begin > 0 || end < KEYS) {
        ints count;
        for (int lane = 0; lane < LANES; lane++)
            count[lane] = lane;
        for (int v = 0; v < KEYS / LANES; v++) {
            ints key = count + LANES * v, seen = (key >= (int32_t)begin) & (key < (int32_t)end);
            scores[v] = choose(seen, scores[v], splat(-INFINITY));
        }
    }
    for (int v = 0; v < KEYS / LANES; v++)
        most = larger(most, scores[v]);
    float block = max_of(most), before = *peak;
    if (block > before)
        *peak = block;
    float highest = *peak == -INFINITY ? 0.0f : *peak;
    for (int v = 0; v < KEYS / LANES; v++) {
        floats weight = exp_of_negative(scores[v] - highest);
        sum += store_rounded(weights + v * LANES, weight);
    }
    float factor = before == *peak ? 1.0f : expf(before - highest);
    *total = *total * factor + sum;
    return factor;
}

struct block {
    const struct step *step;
    int64_t chunk, first, count, kv_head; /* the chunk's tokens from `first` on */
};

/* KEYS rows of K and V, as products take them. */
struct seen {
    const uint32_t *keys, *values;
    const float *scales; /* [2][KEYS], of K and of V; NULL where rows are not coded */
    int64_t begin; /* the first key's position */
};

/* Scores and weights of one head's queries for one block of keys, and the values summed by them. */
INLINE void attend_keys(
    float *sums, state *so_far, const struct block *block, const element *const *queries, const struct seen *seen,
    int64_t first_position, int64_t dim
) {
    const int64_t window = block->step->window;
    for (int64_t row = 0; row < block->count; row += ROWS) {
        floats scores[ROWS][KEYS / LANES];
        element weights[ROWS][KEYS];
        const element *weight_rows[ROWS];
        float factors[ROWS];
        for (int first = 0; first < KEYS / LANES; first += VECTORS) {
            floats parts[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++)
                    parts[r][v] = splat(0.0f);
            multiply_pairs(parts, queries + row, seen->keys + first * LANES, KEYS, dim / 2, VECTORS);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++)
                    scores[r][first + v] =
                        seen->scales ? parts[r][v] * load_float32(seen->scales + (first + v) * LANES) : parts[r][v];
        }
        for (int r = 0; r < ROWS; r++) {
            int64_t end = first_position + row + r + 1 - seen->begin, begin = window ? end - window : 0;
            factors[r] = weigh_keys(weights[r], scores[r], block->step, begin, end < KEYS ? end : KEYS,
                                    &so_far->peaks[row + r], &so_far->totals[row + r]);
            for (int64_t key = 0; seen->scales && key < KEYS; key += LANES)
                store(weights[r], key, load(weights[r], key, ELEMENT) * load_float32(seen->scales + KEYS + key), ELEMENT);
            weight_rows[r] = weights[r];
        }
        for (int64_t d = 0; d < dim; d += VECTORS * LANES) {
            const int vectors = dim - d >= VECTORS * LANES ? VECTORS : 2;
            floats parts[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < vectors; v++)
                    parts[r][v] = load_float32(sums + (row + r) * dim + d + LANES * v) * factors[r];
            if (vectors == VECTORS)
                multiply_pairs(parts, weight_rows, seen->values + d, dim, KEYS / 2, VECTORS);
            else
                multiply_pairs(parts, weight_rows, seen->values + d, dim, KEYS / 2, 2);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < vectors; v++)
                    store_float32(sums + (row + r) * dim + d + LANES * v, parts[r][v]);
        }
    }
}

/* The addresses of KEYS keys. Those before the first one that a query sees are that one's, and those that the chunk has
 * not written are the last one's: no query sees them. */
INLINE void locate_keys(
    const char **at, const struct block *block, int64_t layer, int64_t begin, int64_t seen, int64_t end
) {
    const struct step *step = block->step;
    const int64_t *pages = step->chunk_table + block->chunk * step->chunk_table_stride;
    for (int64_t i = 0; i < KEYS; i++) {
        int64_t position = begin + i < end ? begin + i : end - 1;
        position = position < seen ? seen : position;
        at[i] = run_of(step, pages[position / step->page_size], layer, 0, block->kv_head)
                + position % step->page_size * step->row_bytes;
    }
}

/* Copies the codes of rows as bfloat16, which holds them, and the scales of these rows.
 * rows: [count] of K; those of V are `values_offset` further on. to: [2][count][dim]; scales: [2][count]. */
static __attribute__((noinline)) void widen_rows(
    uint16_t *to, float *scales, const char *const *rows, int64_t count, int64_t values_offset, int64_t dim, int kv
) {
    for (int64_t i = 0; i < 2 * count; i++, to += dim) {
        const char *row = rows[i % count] + i / count * values_offset;
        for (int64_t d = 0; d < dim; d += LANES) {
            floats codes = kv == KV_INT8 ? load_codes(row, d, KV_INT8) : load_codes(row, d, KV_E4M3);
            halfwords upper = __builtin_convertvector((words)codes >> 16, halfwords); /* nothing is cut off but zeros */
            memcpy(to + d, &upper, sizeof upper);
        }
        scales[i] = scale_of(row, dim, kv);
    }
}

/* A sink is as a key that is seen first, without a value. */
INLINE void attend_block(const struct block *block, const struct call *call, int64_t dim) {
    const struct step *step = block->step;
    const int64_t group = step->num_heads / step->num_kv_heads, width = step->num_heads + 2 * step->num_kv_heads;
    const int64_t token = step->chunk_starts[block->chunk] + block->first, layer = call->layer;
    const char *qkv = call->x;
    const int64_t position = step->chunk_positions[block->chunk] + block->first, end = position + block->count;
    const int64_t values_offset = step->page_heads * step->page_size * step->row_bytes;
    const int coded = is_coded(step->kv);
    uint16_t copies[coded ? 2 * KEYS * dim : 1];
    float scales[2 * KEYS];
    float sums[group * TOKENS * dim];
    state so_far[group];
    uint32_t keys[dim / 2 * KEYS], values[KEYS / 2 * dim];
    memset(sums, 0, sizeof sums);
    for (int64_t head = 0; head < group; head++)
        for (int64_t row = 0; row < TOKENS; row++) {
            so_far[head].peaks[row] = call->sinks ? call->sinks[block->kv_head * group + head] : -INFINITY;
            so_far[head].totals[row] = call->sinks ? first_lane(1.0f) : splat(0.0f);
        }
    int64_t seen = step->window && position + 1 > step->window ? position + 1 - step->window : 0;
    for (int64_t begin = seen / KEYS * KEYS; begin < end; begin += KEYS) {
        const char *at[KEYS];
        locate_keys(at, block, layer, begin, seen, end);
        if (coded) {
            widen_rows(copies, scales, at, KEYS, values_offset, dim, step->kv);
            for (int64_t key = 0; key < KEYS; key++)
                at[key] = (const char *)(copies + key * dim);
        }
        for (int64_t key = 0; key < KEYS; key += 16)
            for (int64_t pair = 0; pair < dim / 2; pair += 16)
                transpose_pairs(keys + pair * KEYS + key, at + key, 4 * pair);
        interleave_values(values, at, coded ? KEYS * dim * 2 : values_offset, dim);
        const struct seen rows = {keys, values, coded ? scales : NULL, begin};
        for (int64_t head = 0; head < group; head++) {
            element room[TOKENS][WIDENED(dim)];
            const element *queries[TOKENS];
            for (int64_t row = 0; row < TOKENS; row++) {
                int64_t of = token + (row < block->count ? row : block->count - 1);
                const char *query = qkv + (of * width + block->kv_head * group + head) * dim * 2;
                queries[row] = widened(room[row], (const uint16_t *)query, dim);
            }
            attend_keys(sums + head * TOKENS * dim, &so_far[head], block, queries, &rows, position, dim);
        }
    }
    for (int64_t head = 0; head < group; head++)
        for (int64_t row = 0; row < block->count; row++) {
            const float total = sum_of(so_far[head].totals[row]);
            for (int64_t d = 0; d < dim; d += LANES)
                store(call->out, ((token + row) * step->num_heads + block->kv_head * group + head) * dim + d,
                      load_float32(sums + (head * TOKENS + row) * dim + d) / total, BFLOAT16);
        }
}

void pdserve_blocks(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct step *step = call->step;
    (void)rows;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t *item = step->blocks + unit / step->num_kv_heads * 2;
        int64_t rest = step->chunk_starts[item[0] + 1] - step->chunk_starts[item[0]] - item[1];
        const struct block block = {step, item[0], item[1], rest < TOKENS ? rest : TOKENS, unit % step->num_kv_heads};
        switch (step->head_dim) {
        case 64: attend_block(&block, call, 64); break;
        case 128: attend_block(&block, call, 128); break;
        default: attend_block(&block, call, step->head_dim); break;
        }
    }
}

int64_t pdserve_units_blocks(const struct call *call, int64_t rows) {
    return (void)rows, call->step->num_blocks * call->step->num_kv_heads;
}
