/* Attention over rows that are keys and values of all heads, in bfloat16: absorbed latent attention. A row is read once for
 * all heads of a token, or of the tokens of a block. What a query becomes depends on its own sequence alone. */

#include "key_blocks.h"

/* Tokens of one sequence, each with all of its heads. */
struct tokens {
    int64_t first, count, position; /* of the step, and where the first one is in its sequence */
    const int64_t *pages;
};

INLINE int64_t padded(int64_t count) { return (count + ROWS - 1) / ROWS * ROWS; }

/* Goes over the keys from `begin`, a multiple of KEYS, to before `end`. sums: [padded, value_dim]; so_far: [padded]. */
static void attend_tokens(
    float *sums, state *so_far, const struct call *call, const struct tokens *tokens, int64_t begin, int64_t end
) {
    const struct step *step = call->step;
    const int64_t heads = step->num_heads, count = tokens->count * heads, dim = step->head_dim, values = step->value_dim;
    element room[padded(count)][dim]; /* at equal distances, as a matrix unit takes them */
    const element *queries[padded(count)];
    uint32_t columns[dim / 2 * KEYS], interleaved[KEYS / 2 * values];
    for (int64_t row = 0; row < padded(count); row++) {
        const int64_t of = row < count ? row : count - 1, token = tokens->first + of / heads;
        const uint16_t *query = (const uint16_t *)call->x + (token * (heads + 1) + of % heads) * dim;
        const element *elements = widened(room[row], query, dim);
        queries[row] = elements == room[row] ? elements : memcpy(room[row], elements, dim * sizeof *elements);
        so_far[row] = (state){splat(0.0f), -INFINITY};
    }
    memset(sums, 0, padded(count) * values * sizeof *sums);
    const char *at[KEYS], *next[KEYS];
    locate_keys(next, step, tokens->pages, call->layer, 0, begin, 0, end);
    for (; begin < end; begin += KEYS) {
        memcpy(at, next, sizeof at);
        const int64_t following = begin + KEYS < end ? begin + KEYS : begin;
        locate_keys(next, step, tokens->pages, call->layer, 0, following, 0, end);
        for (int64_t key = 0; key < KEYS; key += 16)
            for (int64_t pair = 0; pair < dim / 2; pair += 16)
                transpose_pairs(columns + pair * KEYS + key, at + key, 4 * pair);
        interleave_values(interleaved, at, 0, values);
        const struct queries of = {queries, count, heads, dim, tokens->position};
        const struct seen seen = {columns, interleaved, next, NULL, begin};
        attend_keys(sums, so_far, step, &of, &seen, dim, values);
    }
}

void pdserve_latent_range(const struct call *call, int64_t item) {
    const struct step *step = call->step;
    const int64_t heads = step->num_heads, values = step->value_dim, stride = step->head_dim + 2;
    const int64_t row = step->items[2 * item], begin = step->items[2 * item + 1] * SPLIT, last = step->ends[row];
    const struct tokens tokens = {row, 1, last - 1, step->table + row * step->table_stride};
    float sums[padded(heads) * values];
    state so_far[padded(heads)];
    attend_tokens(sums, so_far, call, &tokens, begin, begin + SPLIT < last ? begin + SPLIT : last);
    for (int64_t head = 0; head < heads; head++) {
        float *to = step->partials + (item * heads + head) * stride;
        memcpy(to, sums + head * values, values * sizeof *sums);
        to[stride - 2] = so_far[head].peak / LOG2E;
        to[stride - 1] = sum_of(so_far[head].total);
    }
}

void pdserve_latent_block(const struct call *call, int64_t block) {
    const struct step *step = call->step;
    const int64_t heads = step->num_heads, values = step->value_dim, dim = step->head_dim;
    const int64_t chunk = step->blocks[2 * block], first = step->blocks[2 * block + 1], start = step->chunk_starts[chunk];
    const int64_t left = step->chunk_starts[chunk + 1] - start - first, position = step->chunk_positions[chunk] + first;
    const struct tokens tokens = {
        start + first, left < step->block_tokens ? left : step->block_tokens, position,
        step->chunk_table + chunk * step->chunk_table_stride,
    };
    const int64_t count = tokens.count * heads;
    float sums[padded(count) * values];
    state so_far[padded(count)];
    attend_tokens(sums, so_far, call, &tokens, 0, position + tokens.count);
    for (int64_t row = 0; row < count; row++) {
        const float total = sum_of(so_far[row].total);
        for (int64_t d = 0; d < values; d += LANES)
            store(call->out, (tokens.first * heads + row) * dim + d, load_float32(sums + row * values + d) / total, BFLOAT16);
    }
}
