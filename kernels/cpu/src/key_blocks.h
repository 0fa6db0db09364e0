/* Blocks of keys and values in bfloat16, by dot products of pairs, and the online softmax over them (FlashAttention, Dao et
 * al. 2022): for each query the largest score so far, the sum of weights and the weighted sum of values. Keys that a
 * query does not see change none of these. */

#ifndef PDSERVE_KEY_BLOCKS_H
#define PDSERVE_KEY_BLOCKS_H

#include "attention.h"
#include "unit_tiles.h"

#define KEYS 64
#define ROWS 4 /* queries that one stream of keys or values serves at once */
#if defined(__AVX512F__) || defined(__aarch64__)
#define VECTORS 4 /* of each query that are summed at once: ROWS * VECTORS of 32 registers */
#else
#define VECTORS 2 /* of 16 registers */
#endif

#define LOG2E 1.44269504f

/* What a query has seen so far. */
typedef struct {
    floats total; /* of the weights: a sum in each lane */
    float peak;   /* of scores, which are exponents of 2 */
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

/* Adds to sums[row][vector] the products of `count` pairs of each row with columns: [count][stride]. ahead: 16 rows of as
 * many pairs, which are asked for meanwhile, or NULL. */
INLINE void multiply_pairs(
    floats sums[ROWS][VECTORS], const element *const *rows, const uint32_t *columns, int64_t stride, int64_t count,
    int vectors, const char *const *ahead
) {
    for (int64_t pair = 0; pair < count; pair++) {
        if (ahead)
            __builtin_prefetch(ahead[pair % 16] + pair / 16 * 64, 0, 2);
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

/* Stores two vectors of weights as elements, and adds up what bfloat16 holds of them. */
INLINE floats store_rounded(element *to, floats total, floats first, floats last) {
#if defined(HAS_PAIRS)
    static const uint16_t ones[2] = {0x3f80, 0x3f80};
    pairs rounded = rounded_pairs(first, last);
    store_pairs(to, rounded);
    return add_products(total, rounded, splat_pair(ones));
#else
    first = rounded_to(first, BFLOAT16), last = rounded_to(last, BFLOAT16);
    store_float32(to, first);
    store_float32(to + LANES, last);
    return total + first + last;
#endif
}

/* Turns scores of one query into weights that bfloat16 holds, with zeros for keys before `begin` and from `end` on.
 * Returns what its sums so far are to be multiplied with. */
INLINE float weigh_keys(
    element *weights, floats *scores, const struct step *step, int64_t begin, int64_t end, state *so_far
) {
    const float cap = (float)step->soft_cap, scale = cap > 0 ? LOG2E : (float)step->scale * LOG2E; /* above 0 */
    floats most = splat(-INFINITY);
    for (int v = 0; cap > 0 && v < KEYS / LANES; v++)
        scores[v] = soft_capped(scores[v] * (float)step->scale, cap);
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
    float block = max_of(most) * scale, before = so_far->peak;
    if (block > before)
        so_far->peak = block;
    float highest = so_far->peak == -INFINITY ? 0.0f : so_far->peak;
    float factor = before == so_far->peak ? 1.0f : exp2f(before - highest);
    floats total = so_far->total * factor;
    for (int v = 0; v < KEYS / LANES; v += 2)
        total = store_rounded(weights + v * LANES, total, exp2_of_negative(scores[v] * scale - highest),
                              exp2_of_negative(scores[v + 1] * scale - highest));
    so_far->total = total;
    return factor;
}

/* Queries that share K and V: `per_token` of each token, one token after the other. Behind the last one come others, up
 * to a multiple of ROWS, whose results nobody reads. */
struct queries {
    const element *const *rows;
    int64_t count, per_token;
    int64_t stride; /* elements from row to row */
    int64_t position; /* of the first token */
};

/* KEYS rows of K and V, as products take them. */
struct seen {
    const uint32_t *keys, *values;
    const char *const *ahead; /* the rows that come next, [KEYS], or NULL */
    const float *scales; /* [2][KEYS], of K and of V; NULL where rows are not coded */
    int64_t begin; /* the first key's position */
};

/* Turns scores of one query for a block of keys into weights; returns as `weigh_keys` does. row: of the queries. */
INLINE float weigh_row(
    element *weights, floats *scores, state *so_far, const struct step *step, const struct queries *of,
    const struct seen *seen, int64_t row
) {
    const int64_t end = of->position + row / of->per_token + 1 - seen->begin, begin = step->window ? end - step->window : 0;
    for (int v = 0; seen->scales && v < KEYS / LANES; v++)
        scores[v] *= load_float32(seen->scales + v * LANES);
    const float factor = weigh_keys(weights, scores, step, begin, end < KEYS ? end : KEYS, so_far);
    for (int64_t key = 0; seen->scales && key < KEYS; key += LANES)
        store(weights, key, load(weights, key, ELEMENT) * load_float32(seen->scales + KEYS + key), ELEMENT);
    return factor;
}

#if defined(HAS_MATRIX_UNIT)

#define UNIT_QUERIES 64 /* whose scores lie in a core's nearest cache */

/* Scores of up to UNIT_ROWS queries, of which the unit's registers have as many rows: [queries][KEYS]. */
INLINE void score_on_unit(float *scores, const uint16_t *queries, int64_t stride, const uint32_t *keys, int64_t dim) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < dim; d += UNIT_INPUTS, keys += UNIT_INPUTS / 2 * KEYS) {
        _tile_loadd(4, queries + d, 2 * stride);
        _tile_loadd(5, keys, 4 * KEYS);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, keys + 16, 4 * KEYS);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, keys + 32, 4 * KEYS);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, keys + 48, 4 * KEYS);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, scores, 4 * KEYS);
    _tile_stored(1, scores + 16, 4 * KEYS);
    _tile_stored(2, scores + 32, 4 * KEYS);
    _tile_stored(3, scores + 48, 4 * KEYS);
}

/* Adds values of the first keys, by their weights, to sums [queries][value_dim]. count: of these keys. */
INLINE void add_values_on_unit(
    float *sums, const uint16_t weights[][KEYS], const uint32_t *values, int64_t value_dim, int64_t count
) {
    for (int64_t d = 0; d < value_dim; d += 32) {
        _tile_loadd(0, sums + d, 4 * value_dim);
        _tile_loadd(1, sums + d + 16, 4 * value_dim);
        for (int64_t key = 0; key < count; key += UNIT_INPUTS) {
            _tile_loadd(4, weights[0] + key, 2 * KEYS);
            _tile_loadd(5, values + key / 2 * value_dim + d, 4 * value_dim);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, values + key / 2 * value_dim + d + 16, 4 * value_dim);
            _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, sums + d, 4 * value_dim);
        _tile_stored(1, sums + d + 16, 4 * value_dim);
    }
}

/* Gives the registers of `score_on_unit` and `add_values_on_unit` rows for the queries from `row` on; returns how many. */
INLINE int64_t configure_for_queries(int64_t row, int64_t count, int64_t *configured) {
    const uint8_t rows = count - row < UNIT_ROWS ? count - row : UNIT_ROWS;
    if (rows != *configured)
        configure_tiles((const uint8_t[]){rows, rows, rows, rows, rows, UNIT_ROWS, UNIT_ROWS, UNIT_ROWS});
    return *configured = rows;
}

/* As `attend_keys`, on the matrix unit. Scores of several registers' queries are made one after the other, and so are
 * weights, since the unit is late with what it stores. */
INLINE void attend_keys_on_unit(
    float *sums, state *so_far, const struct step *step, const struct queries *of, const struct seen *seen, int64_t dim,
    int64_t value_dim
) {
    int64_t configured = 0;
    finish_writes(seen->keys);
    for (int64_t first = 0; first < of->count; first += UNIT_QUERIES) {
        const int64_t end = first + UNIT_QUERIES < of->count ? first + UNIT_QUERIES : of->count;
        floats scores[UNIT_QUERIES][KEYS / LANES];
        element weights[UNIT_QUERIES][KEYS] __attribute__((aligned(64)));
        for (int64_t row = first; row < end; row += configured) {
            configure_for_queries(row, end, &configured);
            score_on_unit((float *)scores[row - first], of->rows[row], of->stride, seen->keys, dim);
        }
        for (int64_t row = first; row < end; row++) {
            const float factor = weigh_row(weights[row - first], scores[row - first], &so_far[row], step, of, seen, row);
            for (int64_t d = 0; factor != 1.0f && d < value_dim; d += LANES) {
                float *sum = sums + row * value_dim + d;
                store_float32(sum, load_float32(sum) * factor);
            }
        }
        finish_writes(weights);
        for (int64_t row = first; row < end; row += configured) {
            configure_for_queries(row, end, &configured);
            const int64_t last = of->position + (row + configured - 1) / of->per_token + 1 - seen->begin; /* keys seen */
            add_values_on_unit(sums + row * value_dim, weights + row - first, seen->values, value_dim,
                               last < KEYS ? last : KEYS);
        }
    }
    _tile_release();
}

#else
#define attend_keys_on_unit(...) (void)0
#endif

/* Scores and weights of queries for one block of keys, and the values summed by them. sums: [count, value_dim]; both it
 * and so_far have room for a multiple of ROWS. */
INLINE void attend_keys(
    float *sums, state *so_far, const struct step *step, const struct queries *of, const struct seen *seen, int64_t dim,
    int64_t value_dim
) {
    if (pdserve_has_matrix_unit()) {
        attend_keys_on_unit(sums, so_far, step, of, seen, dim, value_dim);
        return;
    }
    for (int64_t row = 0; row < of->count; row += ROWS) {
        floats scores[ROWS][KEYS / LANES];
        element weights[ROWS][KEYS];
        const element *weight_rows[ROWS];
        float factors[ROWS];
        for (int first = 0; first < KEYS / LANES; first += VECTORS) {
            floats parts[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++)
                    parts[r][v] = splat(0.0f);
            multiply_pairs(parts, of->rows + row, seen->keys + first * LANES, KEYS, dim / 2, VECTORS,
                           seen->ahead && first == 0 && row < KEYS / 4 ? seen->ahead + row / ROWS * 16 : NULL);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++)
                    scores[r][first + v] = parts[r][v];
        }
        int64_t last = of->position + (row + ROWS - 1) / of->per_token + 1 - seen->begin; /* seen by none: weights are 0 */
        const int64_t weighed = (last < KEYS ? last + 1 : KEYS) / 2;
        for (int r = 0; r < ROWS; r++) {
            factors[r] = weigh_row(weights[r], scores[r], &so_far[row + r], step, of, seen, row + r);
            weight_rows[r] = weights[r];
        }
        for (int64_t d = 0; d < value_dim; d += VECTORS * LANES) {
            const int vectors = value_dim - d >= VECTORS * LANES ? VECTORS : 2;
            floats parts[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < vectors; v++)
                    parts[r][v] = load_float32(sums + (row + r) * value_dim + d + LANES * v) * factors[r];
            if (vectors == VECTORS)
                multiply_pairs(parts, weight_rows, seen->values + d, value_dim, weighed, VECTORS, NULL);
            else
                multiply_pairs(parts, weight_rows, seen->values + d, value_dim, weighed, 2, NULL);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < vectors; v++)
                    store_float32(sums + (row + r) * value_dim + d + LANES * v, parts[r][v]);
        }
    }
}

/* The addresses of KEYS keys. Those before the first one that a query sees are that one's, and those that the chunk has
 * not written are the last one's: no query sees them. */
INLINE void locate_keys(
    const char **at, const struct step *step, const int64_t *pages, int64_t layer, int64_t kv_head, int64_t begin,
    int64_t seen, int64_t end
) {
    for (int64_t i = 0; i < KEYS; i++) {
        int64_t position = begin + i < end ? begin + i : end - 1;
        position = position < seen ? seen : position;
        at[i] = run_of(step, pages[position / step->page_size], layer, 0, kv_head)
                + position % step->page_size * step->row_bytes;
    }
}

#endif
