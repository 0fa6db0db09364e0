/* Attention of chunks of more than one token over a pool of pages, in bfloat16, by dot products of pairs. Codes of K and
 * V are numbers that bfloat16 holds; scales of K multiply scores, those of V weights.
 *
 * A unit is a block of TOKENS queries of one chunk, with all heads that share one KV head. It goes over its keys in
 * blocks of KEYS positions, which begin at multiples of KEYS. So a query's result depends on its own sequence alone, not
 * on how the sequence was cut into chunks. */

#include "key_blocks.h"

#define TOKENS 64

struct block {
    const struct step *step;
    int64_t chunk, first, count, kv_head; /* the chunk's tokens from `first` on */
};

INLINE floats first_lane(float value) {
    floats lanes = splat(0.0f);
    lanes[0] = value;
    return lanes;
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
    const int64_t group = step->num_heads / step->num_kv_heads, width = step->num_heads + 2 * call->new_heads;
    const int64_t token = step->chunk_starts[block->chunk] + block->first, layer = call->layer;
    const int64_t *pages = step->chunk_table + block->chunk * step->chunk_table_stride;
    const char *qkv = call->x;
    const int64_t position = step->chunk_positions[block->chunk] + block->first, end = position + block->count;
    const int64_t values_offset = step->part_bytes;
    const int coded = is_coded(step->kv);
    uint16_t copies[coded ? 2 * KEYS * dim : 1];
    float scales[2 * KEYS];
    float sums[group * TOKENS * dim];
    state so_far[group][TOKENS];
    uint32_t keys[dim / 2 * KEYS], values[KEYS / 2 * dim];
    memset(sums, 0, sizeof sums);
    for (int64_t head = 0; head < group; head++)
        for (int64_t row = 0; row < TOKENS; row++) {
            so_far[head][row].peak = call->sinks ? call->sinks[block->kv_head * group + head] * LOG2E : -INFINITY;
            so_far[head][row].total = call->sinks ? first_lane(1.0f) : splat(0.0f);
        }
    int64_t seen = step->window && position + 1 > step->window ? position + 1 - step->window : 0;
    for (int64_t begin = seen / KEYS * KEYS; begin < end; begin += KEYS) {
        const char *at[KEYS];
        locate_keys(at, step, pages, layer, block->kv_head, begin, seen, end);
        if (coded) {
            widen_rows(copies, scales, at, KEYS, values_offset, dim, step->kv);
            for (int64_t key = 0; key < KEYS; key++)
                at[key] = (const char *)(copies + key * dim);
        }
        for (int64_t key = 0; key < KEYS; key += 16)
            for (int64_t pair = 0; pair < dim / 2; pair += 16)
                transpose_pairs(keys + pair * KEYS + key, at + key, 4 * pair);
        interleave_values(values, at, coded ? KEYS * dim * 2 : values_offset, dim);
        const struct seen rows = {keys, values, NULL, coded ? scales : NULL, begin};
        for (int64_t head = 0; head < group; head++) {
            element room[TOKENS][WIDENED(dim)];
            const element *queries[TOKENS];
            for (int64_t row = 0; row < TOKENS; row++) {
                int64_t of = token + (row < block->count ? row : block->count - 1);
                const char *query = qkv + (of * width + block->kv_head * group + head) * dim * 2;
                queries[row] = widened(room[row], (const uint16_t *)query, dim);
            }
            const struct queries of = {queries, block->count, 1, width * dim, position};
            attend_keys(sums + head * TOKENS * dim, so_far[head], step, &of, &rows, dim, dim);
        }
    }
    for (int64_t head = 0; head < group; head++)
        for (int64_t row = 0; row < block->count; row++) {
            const float total = sum_of(so_far[head][row].total);
            for (int64_t d = 0; d < dim; d += LANES)
                store(call->out, ((token + row) * step->num_heads + block->kv_head * group + head) * dim + d,
                      load_float32(sums + (head * TOKENS + row) * dim + d) / total, BFLOAT16);
        }
}

void pdserve_blocks(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct step *step = call->step;
    (void)rows;
    for (int64_t unit = begin; unit < end; unit++) {
        if (is_latent(step)) {
            pdserve_latent_block(call, unit);
            continue;
        }
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
