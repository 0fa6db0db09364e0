/* Attention of single queries over a pool of pages: no K or V is copied out of its page.
 *
 * A row is one query token. An item is one range of a row's keys, of one KV head, with all heads that share it; ranges
 * start at multiples of SPLIT positions, whatever else is in the step and however many threads there are. So a row's
 * result depends on its own sequence alone. Ranges of one row are put together in their order.
 */

#define OWN_WIDTH

#include "norm.h"
#include "vectors.h"

#define SPLIT 256        /* keys of an item */
#define MAX_DIM 256      /* of a head */
#define MAX_VECTORS (MAX_DIM / LANES)
#if defined(__AVX2__) && !defined(__AVX512F__)
#define REGISTERS 8 /* vectors that one pass accumulates: of 16 registers */
#else
#define REGISTERS 16 /* of 32 */
#endif
#define MAX_PASS 4       /* heads of a pass */
#define WORTH_THREADS 4096 /* keys times heads of a step; fewer take less time than waking threads */

/* What all layers of a step share. kernels/cpu/attention.py has the same fields. */
struct step {
    char *pool;              /* [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim] */
    const float *cos_sin;    /* [num_tokens, head_dim]: cosines of head_dim / 2 angles, then sines */
    const int64_t *targets;  /* [num_tokens, 2]: page and slot that K and V of a token go to */
    const int64_t *table;    /* [num_rows, table_stride]: a row's pages in order */
    const int64_t *begins;   /* [num_rows]: the first position that a row sees */
    const int64_t *ends;     /* [num_rows]: the position after the last one */
    const int64_t *items;    /* [num_items, 2]: row, and the range of its keys */
    const int64_t *first_items; /* [num_rows + 1] */
    float *partials;         /* [num_items, num_heads, head_dim + 2]: sums, largest score, sum of weights */
    int64_t table_stride, num_tokens, num_rows, num_items, num_keys;
    int64_t num_layers, num_heads, num_kv_heads, head_dim, page_size, type;
};

/* The run of one page, layer and KV head: [page_size, head_dim]. which: 0 for K, 1 for V. */
INLINE char *run_of(const struct step *step, int64_t page, int64_t layer, int64_t which, int64_t head) {
    int64_t run = ((page * step->num_layers + layer) * 2 + which) * step->num_kv_heads + head;
    return step->pool + run * step->page_size * step->head_dim * size_of(step->type);
}

INLINE void rotate_head(char *head, const float *cos_sin, int64_t half, int type) {
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t count = half - i < LANES ? half - i : LANES;
        floats a, b, cosine, sine;
        if (count == LANES) {
            a = load(head, i, type), b = load(head, half + i, type);
            cosine = load_float32(cos_sin + i), sine = load_float32(cos_sin + half + i);
            store(head, i, a * cosine - b * sine, type);
            store(head, half + i, b * cosine + a * sine, type);
        } else {
            a = load_part(head, i, count, type), b = load_part(head, half + i, count, type);
            cosine = load_part(cos_sin, i, count, FLOAT32), sine = load_part(cos_sin, half + i, count, FLOAT32);
            store_part(head, i, count, a * cosine - b * sine, type);
            store_part(head, half + i, count, b * cosine + a * sine, type);
        }
    }
}

/* Norms and rotates q and k of one token in place, and writes its K and V into its page. */
INLINE void place_token(
    const struct step *step, int64_t layer, char *qkv, int64_t token, const char *const *norms, float eps, int type
) {
    int64_t dim = step->head_dim, bytes = dim * size_of(type), queries = step->num_heads, kv_heads = step->num_kv_heads;
    char *heads = qkv + token * (queries + 2 * kv_heads) * bytes;
    for (int64_t head = 0; head < queries + kv_heads; head++) {
        char *at = heads + head * bytes;
        const char *weight = norms[head >= queries];
        if (weight)
            norm_row(at, at, weight, dim, eps, type);
        rotate_head(at, step->cos_sin + token * dim, dim / 2, type);
    }
    int64_t page = step->targets[2 * token], slot = step->targets[2 * token + 1];
    for (int64_t which = 0; which < 2; which++)
        for (int64_t head = 0; head < kv_heads; head++)
            memcpy(run_of(step, page, layer, which, head) + slot * bytes,
                   heads + (queries + which * kv_heads + head) * bytes, bytes);
}

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
#else
    float out[LANES];
    for (int i = 0; i < LANES; i++)
        out[i] = sum_of(v[i]);
    return load_float32(out);
#endif
}

/* Where the keys of a range lie, of KV head 0; its values, and those of other heads, lie as far away in every page.
 * Positions past the end, up to the next multiple of LANES, repeat the last one: no slot is read that holds nothing of
 * this sequence. */
INLINE void locate(
    const char **at, const struct step *step, int64_t row, int64_t layer, int64_t begin, int64_t end, int type
) {
    const int64_t *pages = step->table + row * step->table_stride;
    int64_t bytes = step->head_dim * size_of(type), count = 0;
    for (int64_t position = begin; position < end;) {
        int64_t slot = position % step->page_size;
        const char *from = run_of(step, pages[position / step->page_size], layer, 0, 0);
        for (; slot < step->page_size && position < end; slot++, position++)
            at[count++] = from + slot * bytes;
    }
    for (; count % LANES; count++)
        at[count] = at[count - 1];
}

/* What one pass reads: up to MAX_PASS heads over one range, which share K and V. */
struct pass {
    const char *queries;     /* [heads, head_dim] */
    const char *const *keys; /* of head 0 */
    int64_t keys_offset, values_offset, next_offset; /* bytes from there; next: what will be read after this pass */
    int64_t count;
    float scale;
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
INLINE void score_block(floats *scores, const struct pass *pass, int64_t first, int heads, int vectors, int type) {
    floats q[MAX_PASS * MAX_VECTORS], parts[MAX_PASS][LANES];
    for (int v = 0; v < heads * vectors; v++)
        q[v] = load(pass->queries, v * LANES, type);
    for (int lane = 0; lane < LANES; lane++) {
        const char *key = pass->keys[first + lane] + pass->keys_offset;
        floats dots[MAX_PASS] = {{0}};
        for (int v = 0; v < vectors; v++) {
            floats k = load(key, v * LANES, type);
            for (int head = 0; head < heads; head++)
                dots[head] += q[head * vectors + v] * k;
        }
        for (int head = 0; head < heads; head++)
            parts[head][lane] = dots[head];
    }
    for (int head = 0; head < heads; head++)
        scores[head] = sums_of(parts[head]);
}

/* Sums of values by their weights: out [heads, head_dim + 2]. */
INLINE void sum_values(
    float *out, const struct pass *pass, const float weights[][SPLIT], int heads, int vectors, int type
) {
    floats sums[MAX_PASS][MAX_VECTORS] = {{{0}}};
    for (int64_t i = 0; i < pass->count; i++) {
        const char *values = pass->keys[i] + pass->values_offset;
        for (int v = 0; v < vectors; v++) {
            floats value = load(values, v * LANES, type);
            for (int head = 0; head < heads; head++)
                sums[head][v] += value * weights[head][i];
        }
    }
    for (int head = 0; head < heads; head++)
        for (int v = 0; v < vectors; v++)
            store_float32(out + head * (vectors * LANES + 2) + v * LANES, sums[head][v]);
}

#if defined(__AVX512BF16__)

/* The same in bfloat16, by products of pairs. */
INLINE void score_block_in_pairs(floats *scores, const struct pass *pass, int64_t first, int heads, int pairs) {
    __m512bh q[MAX_PASS * MAX_VECTORS / 2];
    floats parts[MAX_PASS][LANES];
    for (int v = 0; v < heads * pairs; v++)
        q[v] = (__m512bh)_mm512_loadu_si512(pass->queries + v * 64);
    for (int lane = 0; lane < LANES; lane++) {
        const char *key = pass->keys[first + lane] + pass->keys_offset;
        __m512 dots[MAX_PASS];
        for (int head = 0; head < heads; head++)
            dots[head] = _mm512_setzero_ps();
        for (int v = 0; v < pairs; v++) {
            __m512bh k = (__m512bh)_mm512_loadu_si512(key + v * 64);
            for (int head = 0; head < heads; head++)
                dots[head] = _mm512_dpbf16_ps(dots[head], q[head * pairs + v], k);
        }
        for (int head = 0; head < heads; head++)
            parts[head][lane] = (floats)dots[head];
    }
    for (int head = 0; head < heads; head++)
        scores[head] = sums_of(parts[head]);
}

/* Values of two keys side by side: the first 4 dimensions of every 8 in one vector, the last 4 in the other. */
INLINE void sum_values_in_pairs(
    float *out, const struct pass *pass, const float weights[][SPLIT], int heads, int pairs
) {
    uint16_t halves[MAX_PASS][SPLIT];
    __m512 firsts[MAX_PASS][MAX_VECTORS / 2], lasts[MAX_PASS][MAX_VECTORS / 2];
    for (int head = 0; head < heads; head++) {
        for (int64_t i = 0; i < pass->count; i += LANES)
            store_bfloat16(halves[head] + i, load_float32(weights[head] + i));
        for (int v = 0; v < pairs; v++)
            firsts[head][v] = lasts[head][v] = _mm512_setzero_ps();
    }
    for (int64_t i = 0; i < pass->count; i += 2) {
        const char *a = pass->keys[i] + pass->values_offset, *b = pass->keys[i + 1] + pass->values_offset;
        for (int v = 0; v < pairs; v++) {
            __m512i x = _mm512_loadu_si512(a + v * 64), y = _mm512_loadu_si512(b + v * 64);
            __m512bh first = (__m512bh)_mm512_unpacklo_epi16(x, y), last = (__m512bh)_mm512_unpackhi_epi16(x, y);
            for (int head = 0; head < heads; head++) {
                int32_t both;
                memcpy(&both, halves[head] + i, sizeof both);
                __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
                firsts[head][v] = _mm512_dpbf16_ps(firsts[head][v], weight, first);
                lasts[head][v] = _mm512_dpbf16_ps(lasts[head][v], weight, last);
            }
        }
    }
    for (int head = 0; head < heads; head++)
        for (int v = 0; v < pairs; v++) {
            float *to = out + head * (pairs * 2 * LANES + 2) + v * 2 * LANES, lanes[2][LANES];
            _mm512_storeu_ps(lanes[0], firsts[head][v]);
            _mm512_storeu_ps(lanes[1], lasts[head][v]);
            for (int part = 0; part < 8; part++)
                memcpy(to + 4 * part, lanes[part % 2] + part / 2 * 4, 16);
        }
}

#define IN_PAIRS(type, vectors) ((type) == BFLOAT16 && (vectors) % 2 == 0)

#else

#define IN_PAIRS(type, vectors) 0
#define score_block_in_pairs(...) (void)0
#define sum_values_in_pairs(...) (void)0

#endif

/* out: [heads, head_dim + 2]. */
INLINE void attend_pass(float *out, const struct pass *pass, int heads, int vectors, int type) {
    float weights[MAX_PASS][SPLIT];
    int64_t stride = vectors * LANES + 2;
    for (int64_t first = 0; first < pass->count; first += LANES) {
        floats scores[MAX_PASS];
        ask_for(pass, first, vectors * LANES * size_of(type));
        if (IN_PAIRS(type, vectors))
            score_block_in_pairs(scores, pass, first, heads, vectors / 2);
        else
            score_block(scores, pass, first, heads, vectors, type);
        for (int head = 0; head < heads; head++)
            store_float32(weights[head] + first, scores[head] * pass->scale);
    }
    for (int head = 0; head < heads; head++)
        weigh(weights[head], out + head * stride + vectors * LANES, pass->count, type);
    if (IN_PAIRS(type, vectors))
        sum_values_in_pairs(out, pass, weights, heads, vectors / 2);
    else
        sum_values(out, pass, weights, heads, vectors, type);
}

/* The same with the number of heads and vectors known to the compiler, for the usual ones. */
INLINE void attend_heads(float *out, const struct pass *pass, int heads, int vectors, int type) {
    switch (heads) {
    case 1: attend_pass(out, pass, 1, vectors, type); break;
    case 2: if (2 * vectors <= REGISTERS) attend_pass(out, pass, 2, vectors, type); break;
    case 3: if (3 * vectors <= REGISTERS) attend_pass(out, pass, 3, vectors, type); break;
    default: if (4 * vectors <= REGISTERS) attend_pass(out, pass, 4, vectors, type); break;
    }
}

INLINE void attend_item(const struct step *step, int64_t layer, const char *qkv, int64_t item, int type) {
    const char *keys[SPLIT + LANES];
    int64_t row = step->items[2 * item], range = step->items[2 * item + 1] * SPLIT;
    int64_t begin = range > step->begins[row] ? range : step->begins[row];
    int64_t end = range + SPLIT < step->ends[row] ? range + SPLIT : step->ends[row];
    int64_t dim = step->head_dim, group = step->num_heads / step->num_kv_heads, vectors = dim / LANES;
    int64_t per_pass = vectors * MAX_PASS <= REGISTERS ? MAX_PASS : vectors <= REGISTERS ? REGISTERS / vectors : 1;
    int64_t run_bytes = step->page_size * dim * size_of(type);
    const char *queries = qkv + row * (step->num_heads + 2 * step->num_kv_heads) * dim * size_of(type);
    locate(keys, step, row, layer, begin, end, type);
    for (int64_t kv_head = 0; kv_head < step->num_kv_heads; kv_head++)
        for (int64_t first = 0; first < group; first += per_pass) {
            int64_t head = kv_head * group + first, offset = kv_head * run_bytes;
            int heads = group - first < per_pass ? group - first : per_pass;
            float *out = step->partials + (item * step->num_heads + head) * (dim + 2);
            const struct pass pass = {
                queries + head * dim * size_of(type), keys, offset, offset + step->num_kv_heads * run_bytes,
                first + heads < group ? offset : offset + run_bytes, end - begin, 1.0f / sqrtf((float)dim),
            };
            switch (dim) {
            case 64: attend_heads(out, &pass, heads, 64 / LANES, type); break;
            case 128: attend_heads(out, &pass, heads, 128 / LANES, type); break;
            default: attend_pass(out, &pass, heads, vectors, type); break;
            }
        }
}

/* Puts a row's ranges together. out: [num_rows, num_heads * head_dim]. */
INLINE void combine_row(const struct step *step, char *out, int64_t row, int type) {
    int64_t dim = step->head_dim, stride = step->num_heads * (dim + 2);
    int64_t first = step->first_items[row], last = step->first_items[row + 1];
    for (int64_t head = 0; head < step->num_heads; head++) {
        const float *parts = step->partials + first * stride + head * (dim + 2);
        float peak = -INFINITY, total = 0.0f, factors[last - first];
        for (int64_t i = 0; i < last - first; i++)
            peak = parts[i * stride + dim] > peak ? parts[i * stride + dim] : peak;
        for (int64_t i = 0; i < last - first; i++) {
            factors[i] = last - first == 1 ? 1.0f : expf(parts[i * stride + dim] - peak);
            total += factors[i] * parts[i * stride + dim + 1];
        }
        for (int64_t v = 0; v < dim; v += LANES) {
            floats sum = {0};
            for (int64_t i = 0; i < last - first; i++)
                sum += load_float32(parts + i * stride + v) * factors[i];
            store(out, (row * step->num_heads + head) * dim + v, sum / total, type);
        }
    }
}

INLINE void attend(
    const struct step *step, int64_t layer, char *qkv, char *out, const char *const *norms, float eps, int type
) {
#pragma omp parallel if (step->num_tokens > 64 || step->num_keys * step->num_heads >= WORTH_THREADS)
    {
#pragma omp for
        for (int64_t token = 0; token < step->num_tokens; token++)
            place_token(step, layer, qkv, token, norms, eps, type);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < step->num_items; item++)
            attend_item(step, layer, qkv, item, type);
#pragma omp for
        for (int64_t row = 0; row < step->num_rows; row++)
            combine_row(step, out, row, type);
    }
}

/* Norms and rotates q and k of all tokens in place, writes K and V into the pages, and attends with the first num_rows
 * tokens. qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; q_norm, k_norm: [head_dim] or NULL. */
void pdserve_attend(
    const struct step *step, int64_t layer, void *qkv, void *out, const void *q_norm, const void *k_norm, float eps
) {
    const char *norms[2] = {q_norm, k_norm};
    if (step->type == FLOAT32)
        attend(step, layer, qkv, out, norms, eps, FLOAT32);
    else
        attend(step, layer, qkv, out, norms, eps, BFLOAT16);
}
