/* Attention of up to MAX_PASS heads over one range of keys that they share. */

#ifndef PDSERVE_ATTENTION_PASS_H
#define PDSERVE_ATTENTION_PASS_H

#include "attention.h"
#include "vectors.h"

#define MAX_DIM 1024     /* of a head */
#define MAX_VECTORS (MAX_DIM / LANES)
#if defined(__AVX2__) && !defined(__AVX512F__)
#define REGISTERS 8 /* vectors that one pass accumulates: of 16 registers */
#else
#define REGISTERS 16 /* of 32 */
#endif
#define MAX_PASS 4 /* heads of a pass */
#define WIDTH(heads) (REGISTERS / ((heads) == 3 ? 4 : (heads))) /* vectors of values that one pass over keys sums up */

/* The sum of each of LANES vectors, in their order. */
INLINE floats sums_of(const floats *v) {
#if defined(__AVX512F__)
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; i++) {
        __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
        pairs[i] = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    }
    for (int i = 0; i < 4; i++) {
        __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
        fours[i] = (__m512)_mm512_unpacklo_pd(a, b) + (__m512)_mm512_unpackhi_pd(a, b);
    }
    __m512 a = _mm512_shuffle_f32x4(fours[0], fours[1], 0x44) + _mm512_shuffle_f32x4(fours[0], fours[1], 0xee);
    __m512 b = _mm512_shuffle_f32x4(fours[2], fours[3], 0x44) + _mm512_shuffle_f32x4(fours[2], fours[3], 0xee);
    return (floats)(_mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd));
#elif defined(__aarch64__)
    float32x4_t first = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    return (floats)vpaddq_f32(first, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]));
#else
    float out[LANES];
    for (int i = 0; i < LANES; i++)
        out[i] = sum_of(v[i]);
    return load_float32(out);
#endif
}

/* The type of queries that multiply rows of this kv, and in which weights multiply values: codes are as floats. */
INLINE int type_of(int kv) { return is_coded(kv) ? FLOAT32 : kv; }

/* What one pass reads: up to MAX_PASS heads over one range, which share K and V. */
struct pass {
    const char *queries;     /* [heads, head_dim] */
    const char *const *keys; /* of head 0 */
    int64_t keys_offset, values_offset, next_offset; /* bytes from there; next: what will be read after this pass */
    int64_t count;
    float scale, soft_cap;
};

/* Asks for the keys two blocks ahead and for the values of this block: a page begins before the processor sees a
 * pattern in what is read. */
INLINE void ask_for(const struct pass *pass, int64_t first, int64_t bytes) {
    const int64_t ahead = 2 * LANES, padded = (pass->count + LANES - 1) / LANES * LANES;
    for (int64_t i = first; i < first + LANES; i++)
        for (int64_t line = 0; line < bytes; line += 64) {
            __builtin_prefetch(pass->keys[i] + pass->values_offset + line, 0, 2);
            if (i + ahead < padded)
                __builtin_prefetch(pass->keys[i + ahead] + pass->keys_offset + line);
            else if (i < LANES || i + LANES >= padded)
                __builtin_prefetch(pass->keys[i % LANES] + pass->next_offset + line);
        }
}

/* Turns scores into weights in place, with zeros past the count; writes the largest score and the weights' sum. */
INLINE void weigh(float *weights, float *largest_and_sum, int64_t count, int type) {
    floats most = splat(-INFINITY), total = {0};
    for (int64_t i = 0; i < count; i += LANES)
        most = larger(most, load_float32(weights + i));
    float peak = max_of(most);
    for (int64_t i = 0; i < count; i += LANES) {
        floats weight = rounded_to(exp_of(load_float32(weights + i) - peak), type);
        if (count - i < LANES)
            weight = load_part(&weight, 0, count - i, FLOAT32);
        total += weight;
        store_float32(weights + i, weight);
    }
    largest_and_sum[0] = peak;
    largest_and_sum[1] = sum_of(total);
}

/* Scores of one block of keys: [heads][LANES]. */
INLINE void score_block(floats *scores, const struct pass *pass, int64_t first, int heads, int vectors, int kv) {
    floats q[MAX_PASS * MAX_VECTORS], parts[MAX_PASS][LANES];
    for (int v = 0; v < heads * vectors; v++)
        q[v] = load(pass->queries, v * LANES, type_of(kv));
    for (int lane = 0; lane < LANES; lane++) {
        const char *key = pass->keys[first + lane] + pass->keys_offset;
        floats dots[MAX_PASS] = {{0}};
        for (int v = 0; v < vectors; v++) {
            floats k = load_kv(key, v * LANES, kv);
            for (int head = 0; head < heads; head++)
                dots[head] += q[head * vectors + v] * k;
        }
        for (int head = 0; head < heads; head++)
            parts[head][lane] = dots[head];
    }
    for (int head = 0; head < heads; head++)
        scores[head] = sums_of(parts[head]);
}

/* Sums of `width` vectors of values, from one on, by their weights: out [heads, head_dim + 2]. */
INLINE void sum_vectors(
    float *out, const struct pass *pass, const float weights[][SPLIT], int heads, int vectors, int from, int width, int kv
) {
    floats sums[MAX_PASS][REGISTERS] = {{{0}}};
    for (int64_t i = 0; i < pass->count; i++) {
        const char *values = pass->keys[i] + pass->values_offset;
        for (int v = 0; v < width; v++) {
            floats value = load_kv(values, (from + v) * LANES, kv);
            for (int head = 0; head < heads; head++)
                sums[head][v] += value * weights[head][i];
        }
    }
    for (int head = 0; head < heads; head++)
        for (int v = 0; v < width; v++)
            store_float32(out + head * (vectors * LANES + 2) + (from + v) * LANES, sums[head][v]);
}

INLINE void sum_values(
    float *out, const struct pass *pass, const float weights[][SPLIT], int heads, int vectors, int kv
) {
    const int width = WIDTH(heads), whole = vectors / width * width;
    for (int from = 0; from < whole; from += width)
        sum_vectors(out, pass, weights, heads, vectors, from, width, kv);
    for (int from = whole; from < vectors; from++)
        sum_vectors(out, pass, weights, heads, vectors, from, 1, kv);
}

#if defined(HAS_PAIRS)

/* The same in bfloat16, by products of pairs. */
INLINE void score_block_in_pairs(floats *scores, const struct pass *pass, int64_t first, int heads, int vectors) {
    pairs q[MAX_PASS * MAX_VECTORS / 2];
    floats parts[MAX_PASS][LANES];
    for (int v = 0; v < heads * vectors; v++)
        q[v] = load_pairs(pass->queries + v * BYTES);
    for (int lane = 0; lane < LANES; lane++) {
        const char *key = pass->keys[first + lane] + pass->keys_offset;
        floats dots[MAX_PASS];
        for (int head = 0; head < heads; head++)
            dots[head] = splat(0.0f);
        for (int v = 0; v < vectors; v++) {
            pairs k = load_pairs(key + v * BYTES);
            for (int head = 0; head < heads; head++)
                dots[head] = add_products(dots[head], q[head * vectors + v], k);
        }
        for (int head = 0; head < heads; head++)
            parts[head][lane] = dots[head];
    }
    for (int head = 0; head < heads; head++)
        scores[head] = sums_of(parts[head]);
}

/* Values of two keys side by side: the first 4 dimensions of every 8 in one vector, the last 4 in the other. */
INLINE void sum_values_in_pairs(
    float *out, const struct pass *pass, const float weights[][SPLIT], int heads, int vectors
) {
    uint16_t halves[MAX_PASS][SPLIT];
    floats firsts[MAX_PASS][MAX_VECTORS / 2], lasts[MAX_PASS][MAX_VECTORS / 2];
    for (int head = 0; head < heads; head++) {
        for (int64_t i = 0; i < pass->count; i += LANES)
            store_bfloat16(halves[head] + i, load_float32(weights[head] + i));
        for (int v = 0; v < vectors; v++)
            firsts[head][v] = lasts[head][v] = splat(0.0f);
    }
    for (int64_t i = 0; i < pass->count; i += 2) {
        const char *a = pass->keys[i] + pass->values_offset, *b = pass->keys[i + 1] + pass->values_offset;
        for (int v = 0; v < vectors; v++) {
            pairs first, last;
            zip(&first, &last, load_pairs(a + v * BYTES), load_pairs(b + v * BYTES));
            for (int head = 0; head < heads; head++) {
                pairs weight = splat_pair(halves[head] + i);
                firsts[head][v] = add_products(firsts[head][v], weight, first);
                lasts[head][v] = add_products(lasts[head][v], weight, last);
            }
        }
    }
    for (int head = 0; head < heads; head++)
        for (int v = 0; v < vectors; v++) {
            float *to = out + head * (vectors * 2 * LANES + 2) + v * 2 * LANES, lanes[2][LANES];
            store_float32(lanes[0], firsts[head][v]);
            store_float32(lanes[1], lasts[head][v]);
            for (int part = 0; part < LANES / 2; part++)
                memcpy(to + 4 * part, lanes[part % 2] + part / 2 * 4, 16);
        }
}

#define IN_PAIRS(kv, vectors) ((kv) == BFLOAT16 && (vectors) % 2 == 0)

#else

#define IN_PAIRS(kv, vectors) ((void)(kv), 0)
#define score_block_in_pairs(...) (void)0
#define sum_values_in_pairs(...) (void)0

#endif

/* The heads of a pass, at most. In pairs it sums up all vectors of its heads at once, else some after the others. */
INLINE int64_t heads_of_pass(int64_t vectors, int kv) {
    if (!IN_PAIRS(kv, vectors) || vectors * MAX_PASS <= REGISTERS)
        return MAX_PASS;
    return vectors <= REGISTERS ? REGISTERS / vectors : 1;
}

/* Multiplies what belongs to LANES keys by the scales of their rows, which lie `offset` behind them. */
INLINE floats times_scales(floats each, const char *const *rows, int64_t offset, int64_t dim, int kv) {
    floats scales;
    for (int lane = 0; lane < LANES; lane++)
        scales[lane] = scale_of(rows[lane] + offset, dim, kv);
    return each * scales;
}

/* out: [heads, head_dim + 2]. */
INLINE void attend_pass(float *out, const struct pass *pass, int heads, int vectors, int kv) {
    float weights[MAX_PASS][SPLIT];
    const int coded = is_coded(kv);
    int64_t dim = vectors * LANES, stride = dim + 2;
    for (int64_t first = 0; first < pass->count; first += LANES) {
        floats scores[MAX_PASS], scale = splat(pass->scale);
        ask_for(pass, first, coded ? dim : dim * size_of(kv));
        if (IN_PAIRS(kv, vectors))
            score_block_in_pairs(scores, pass, first, heads, vectors / 2);
        else
            score_block(scores, pass, first, heads, vectors, kv);
        if (coded)
            scale = times_scales(scale, pass->keys + first, pass->keys_offset, dim, kv);
        for (int head = 0; head < heads; head++) {
            floats scaled = scores[head] * scale;
            store_float32(weights[head] + first, pass->soft_cap > 0 ? soft_capped(scaled, pass->soft_cap) : scaled);
        }
    }
    for (int head = 0; head < heads; head++)
        weigh(weights[head], out + head * stride + dim, pass->count, type_of(kv));
    for (int64_t i = 0; coded && i < pass->count; i += LANES) {
        floats scales = times_scales(splat(1.0f), pass->keys + i, pass->values_offset, dim, kv);
        for (int head = 0; head < heads; head++)
            store_float32(weights[head] + i, load_float32(weights[head] + i) * scales);
    }
    if (IN_PAIRS(kv, vectors))
        sum_values_in_pairs(out, pass, weights, heads, vectors / 2);
    else
        sum_values(out, pass, weights, heads, vectors, kv);
}

/* The same with the number of heads and vectors known to the compiler, for the usual ones. */
INLINE void attend_heads(float *out, const struct pass *pass, int heads, int vectors, int kv) {
    const int most = heads_of_pass(vectors, kv);
    switch (heads) {
    case 1: attend_pass(out, pass, 1, vectors, kv); break;
    case 2: if (most >= 2) attend_pass(out, pass, 2, vectors, kv); break;
    case 3: if (most >= 3) attend_pass(out, pass, 3, vectors, kv); break;
    default: if (most >= 4) attend_pass(out, pass, 4, vectors, kv); break;
    }
}

#define USUAL(name, kv) \
    static __attribute__((noinline)) void name(float *out, const struct pass *given, int heads, int vectors) { \
        const struct pass pass = *given; /* which no store can change */ \
        switch (vectors * LANES) { \
        case 64: attend_heads(out, &pass, heads, 64 / LANES, kv); break; \
        case 128: attend_heads(out, &pass, heads, 128 / LANES, kv); break; \
        default: attend_pass(out, &pass, heads, vectors, kv); break; \
        } \
    }

/* A function for each kv: a compiler takes far longer for all of them in one. */
USUAL(attend_float32, FLOAT32)
USUAL(attend_bfloat16, BFLOAT16)
USUAL(attend_int8, KV_INT8)
USUAL(attend_e4m3, KV_E4M3)

INLINE void attend(float *out, const struct pass *pass, int heads, int vectors, int kv) {
    switch (kv) {
    case FLOAT32: attend_float32(out, pass, heads, vectors); break;
    case BFLOAT16: attend_bfloat16(out, pass, heads, vectors); break;
    case KV_INT8: attend_int8(out, pass, heads, vectors); break;
    case KV_E4M3: attend_e4m3(out, pass, heads, vectors); break;
    }
}

#endif
