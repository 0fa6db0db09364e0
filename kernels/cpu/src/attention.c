/* Attention of single queries over a pool of pages: no K or V is copied out of its page.
 *
 * A row is one query token. An item is one range of a row's keys, for all heads; ranges start at multiples of SPLIT
 * positions, whatever else is in the step and however many threads there are. So a row's result depends on its own
 * sequence alone. Ranges of one row are put together in their order.
 */

#include "attention.h"
#include "attention_pass.h"
#include "norm.h"

#define WORTH_THREADS 4096 /* keys times heads of a step; fewer take less time than waking threads */

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

/* Norms and rotates q and k of one token in place, norms v, and writes its K and V into its page. */
INLINE void place_token(const struct call *call, int64_t token, const char *const *norms, int type) {
    const struct step *step = call->step;
    int64_t dim = step->head_dim, bytes = dim * size_of(type), queries = step->num_heads, kv_heads = call->new_heads;
    int64_t turning = step->turning, still_bytes = (dim - turning) * size_of(type);
    const float *cos_sin = step->cos_sin + (call->rope * step->num_tokens + token) * turning;
    const float eps = (float)call->eps;
    char *heads = (char *)call->x + token * (queries + step->parts * kv_heads) * bytes;
    for (int64_t head = 0; head < queries + kv_heads; head++) {
        char *at = heads + head * bytes;
        const char *weight = norms[head >= queries];
        if (weight && !call->norms_after)
            norm_row(at, at, weight, dim, eps, type);
        rotate_head(at + still_bytes, cos_sin, turning / 2, type);
        if (weight && call->norms_after)
            norm_row(at, at, weight, dim, eps, type);
    }
    for (int64_t head = queries + kv_heads; norms[2] && head < queries + 2 * kv_heads; head++)
        norm_row(heads + head * bytes, heads + head * bytes, norms[2], dim, eps, type);
    int64_t page = step->targets[2 * token], slot = step->targets[2 * token + 1];
    for (int64_t which = 0; which < step->parts; which++)
        for (int64_t head = 0; head < kv_heads; head++) {
            char *to = run_of(step, page, call->layer, which, head) + slot * step->row_bytes;
            const char *from = heads + (queries + which * kv_heads + head) * bytes;
            if (is_coded(step->kv))
                pack_row(to, from, dim, type, step->kv);
            else
                memcpy(to, from, bytes);
        }
}

/* Where the keys of a range lie, of KV head 0; its values, and those of other heads, lie as far away in every page.
 * Positions past the end, up to the next multiple of LANES, repeat the last one: no slot is read that holds nothing of
 * this sequence. */
INLINE void locate(
    const char **at, const struct step *step, int64_t row, int64_t layer, int64_t begin, int64_t end
) {
    const int64_t *pages = step->table + row * step->table_stride;
    int64_t bytes = step->row_bytes, count = 0;
    for (int64_t position = begin; position < end;) {
        int64_t slot = position % step->page_size;
        const char *from = run_of(step, pages[position / step->page_size], layer, 0, 0);
        for (; slot < step->page_size && position < end; slot++, position++)
            at[count++] = from + slot * bytes;
    }
    for (; count % LANES; count++)
        at[count] = at[count - 1];
}

INLINE void attend_item(const struct call *call, int64_t item) {
    const struct step *step = call->step;
    const char *located[SPLIT + LANES];
    int64_t row = step->items[2 * item], range = step->items[2 * item + 1] * SPLIT;
    int64_t begin = range > step->begins[row] ? range : step->begins[row];
    int64_t end = range + SPLIT < step->ends[row] ? range + SPLIT : step->ends[row];
    int64_t dim = step->head_dim, group = step->num_heads / step->num_kv_heads, vectors = dim / LANES;
    int64_t values_offset = (step->parts - 1) * step->part_bytes;
    int64_t query_bytes = dim * size_of(type_of(step->kv)), is_widened = type_of(step->kv) != step->type;
    int64_t per_pass = heads_of_pass(vectors, step->kv);
    const char *queries = call->x;
    queries += row * (step->num_heads + step->parts * call->new_heads) * dim * size_of(step->type);
    float room[is_widened ? step->num_heads * dim : 1];
    for (int64_t i = 0; is_widened && i < step->num_heads * dim; i += LANES)
        store_float32(room + i, load(queries, i, BFLOAT16));
    queries = is_widened ? (const char *)room : queries;
    locate(located, step, row, call->layer, begin, end);
    for (int64_t kv_head = 0; kv_head < step->num_kv_heads; kv_head++) {
        int64_t offset = kv_head * step->head_bytes;
        for (int64_t first = 0; first < group; first += per_pass) {
            int64_t head = kv_head * group + first;
            int heads = group - first < per_pass ? group - first : per_pass;
            struct pass pass = {
                queries + head * query_bytes, located, offset, offset + values_offset,
                first + heads < group ? offset : offset + step->head_bytes, end - begin,
                (float)step->scale, (float)step->soft_cap,
            };
            attend(step->partials + (item * step->num_heads + head) * (dim + 2), &pass, heads, vectors, step->kv);
        }
    }
}

/* Puts a row's ranges together, and its heads' sinks. out: [num_rows, num_heads * head_dim]. */
INLINE void combine_row(const struct step *step, const float *sinks, char *out, int64_t row, int type) {
    int64_t dim = step->head_dim, stride = step->num_heads * (dim + 2);
    int64_t first = step->first_items[row], last = step->first_items[row + 1];
    for (int64_t head = 0; head < step->num_heads; head++) {
        const float *parts = step->partials + first * stride + head * (dim + 2);
        float peak = sinks ? sinks[head] : -INFINITY, total = 0.0f, factors[last - first];
        for (int64_t i = 0; i < last - first; i++)
            peak = parts[i * stride + dim] > peak ? parts[i * stride + dim] : peak;
        for (int64_t i = 0; i < last - first; i++) {
            factors[i] = last - first == 1 && !sinks ? 1.0f : expf(parts[i * stride + dim] - peak);
            total += factors[i] * parts[i * stride + dim + 1];
        }
        total += sinks ? expf(sinks[head] - peak) : 0.0f;
        for (int64_t v = 0; v < step->value_dim; v += LANES) {
            floats sum = {0};
            for (int64_t i = 0; i < last - first; i++)
                sum += load_float32(parts + i * stride + v) * factors[i];
            store(out, (row * step->num_heads + head) * dim + v, sum / total, type);
        }
    }
}

int pdserve_attention_is_long(const struct call *call) {
    return call->step->num_tokens > 64 || call->step->num_keys * call->step->num_heads >= WORTH_THREADS;
}

/* Attention is three calls: q and k of all tokens are normed and rotated in place, and K and V written into the pages;
 * the first num_rows tokens attend to each range of their keys; a row's ranges are put together.
 * x: [num_tokens, num_heads + parts * new_heads, head_dim]; out: [num_rows, num_heads * head_dim]. */

int64_t pdserve_units_placing(const struct call *call, int64_t rows) { return (void)rows, call->step->num_tokens; }

int64_t pdserve_units_ranges(const struct call *call, int64_t rows) { return (void)rows, call->step->num_items; }

int64_t pdserve_units_combining(const struct call *call, int64_t rows) { return (void)rows, call->step->num_rows; }

void pdserve_placing(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const char *const norms[3] = {call->q_norm, call->k_norm, call->v_norm};
    (void)rows;
    for (int64_t token = begin; token < end; token++) {
        if (call->step->type == FLOAT32)
            place_token(call, token, norms, FLOAT32);
        else
            place_token(call, token, norms, BFLOAT16);
    }
}

void pdserve_ranges(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    (void)rows;
    for (int64_t item = begin; item < end; item++) {
        if (is_latent(call->step))
            pdserve_latent_range(call, item);
        else
            attend_item(call, item);
    }
}

void pdserve_combining(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    (void)rows;
    for (int64_t row = begin; row < end; row++) {
        if (call->step->type == FLOAT32)
            combine_row(call->step, call->sinks, call->out, row, FLOAT32);
        else
            combine_row(call->step, call->sinks, call->out, row, BFLOAT16);
    }
}
