/* Recurrences over states in pages: short convolutions (LFM2), gated delta nets (Yang, Kautz, Hatamizadeh 2024) and
 * Mamba-2 (Dao, Gu 2024).
 *
 * Tokens of a sequence come one after the other, whether a step has one of them or many. Columns of a memory do not
 * depend on each other: a unit is some columns of one head, which stay in a core's cache. So what a token becomes, and
 * the state behind it, depend on its sequence alone, not on how that was cut into chunks.
 *
 * No page is written before `pdserve_keeping`. It computes the states behind short chunks again, which takes less memory
 * traffic than a copy of one state, and no room for a state behind each guess; those behind longer chunks lie in scratch
 * until then. */

#define OWN_WIDTH

#include "states.h"
#include "calls.h"
#include "vectors.h"

/* Vectors of a memory's row that are computed at once, each with sums of two kinds. With AVX-512 whole rows of 128 values
 * take 0.62 to 0.70 times as long as halves in steps of 16 sequences. */
#define VECTORS 4
#if defined(__AVX512F__)
#define MOST_VECTORS 8 /* where rows are that long */
#else
#define MOST_VECTORS VECTORS
#endif
#define LENGTH_EPS 1e-6f /* of the lengths of q and k */

INLINE float *page_of(const struct states *states, int64_t page) { return states->pool + page * states->page_floats; }

/* A number at a time: there are few. */
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* What a row brings to a convolution. */
INLINE floats input_of(const struct recurrence *of, const char *row, int64_t i, int64_t count, int type) {
    floats x = load_up_to(row + of->inputs_at * size_of(type), i, count, type);
    return of->heads ? x : rounded_to(load_up_to(row + of->before_at * size_of(type), i, count, type) * x, type);
}

/* Sums up one token's inputs and those before it, in some channels; the last inputs go to scratch where a piece ends. */
INLINE void convolve_run(float *sums, const struct call *call, int64_t token, struct run run, int type) {
    const struct states *states = call->states;
    const struct recurrence *of = call->recurrence;
    const int64_t chunk = states->chunks[token], channels = of->channels, kernel = of->kernel;
    const int64_t piece = states->ended[token], page = states->before[chunk];
    const float *kept = page < 0 ? NULL : page_of(states, page) + of->kept_at + run.offset;
    const int64_t row_bytes = call->x_stride * size_of(type);
    const char *row = (const char *)call->x + token * row_bytes;
    float *keeps = piece < 0 ? NULL : (float *)call->scratch + piece * (kernel - 1) * channels;
    for (int64_t i = run.begin; i < run.end; i += LANES) {
        const int64_t count = run.end - i;
        floats sum = of->bias ? load_up_to(of->bias, i, count, FLOAT32) : splat(0.0f);
        for (int64_t place = 0; place < kernel; place++) {
            const int64_t before = kernel - 1 - place, missing = before - (token - states->starts[chunk]);
            floats x = splat(0.0f);
            if (missing <= 0)
                x = input_of(of, row - before * row_bytes, i, count, type);
            else if (kept)
                x = load_up_to(kept + (kernel - 1 - missing) * of->kept_width, i, count, FLOAT32);
            sum += x * load_up_to(of->weight + place * channels, i, count, FLOAT32);
            if (keeps && place)
                store_up_to(keeps + (place - 1) * channels, i, count, x, FLOAT32);
        }
        store_up_to(sums, i, count, sum, FLOAT32);
    }
}

INLINE void convolve(float *sums, const struct call *call, int64_t token, int type) {
    for (int64_t i = 0; i < call->recurrence->num_runs; i++)
        convolve_run(sums, call, token, call->recurrence->runs[i], type);
}

/* Gives a vector another length. */
INLINE void to_length(float *x, int64_t dim, float length) {
    floats squares = splat(0.0f);
    for (int64_t i = 0; i < dim; i += LANES) {
        floats part = load_up_to(x, i, dim - i, FLOAT32);
        squares += part * part;
    }
    const float scale = length / sqrtf(sum_of(squares) + LENGTH_EPS);
    for (int64_t i = 0; i < dim; i += LANES)
        store_up_to(x, i, dim - i, load_up_to(x, i, dim - i, FLOAT32) * scale, FLOAT32);
}

/* Makes what heads take of the sums of a convolution. */
INLINE void prepare(float *sums, const struct recurrence *of, const char *taken, int type) {
    float *left = sums + of->channels, *learnt = left + of->heads;
    for (int64_t i = 0; i < of->channels; i += LANES) {
        floats x = load_up_to(sums, i, of->channels - i, FLOAT32);
        store_up_to(sums, i, of->channels - i, x / (1.0f + exp_of(-x)), FLOAT32);
    }
    for (int64_t group = 0; of->corrects && group < of->groups; group++) {
        to_length(sums + of->q_at + group * of->key_dim, of->key_dim, 1.0f / sqrtf((float)of->key_dim));
        to_length(sums + of->k_at + group * of->key_dim, of->key_dim, 1.0f);
    }
    for (int64_t head = 0; head < of->heads; head++) {
        const float step = softplus(load_one(taken, of->rates_at + head, type) + of->rate_bias[head]);
        left[head] = expf(of->rate[head] * step);
        learnt[head] = of->corrects ? sigmoid(load_one(taken, of->betas_at + head, type)) : step;
    }
}

INLINE void convolve_rows(const struct call *call, int64_t begin, int64_t end, int type) {
    const struct recurrence *of = call->recurrence;
    const int64_t size = size_of(type);
    for (int64_t token = begin; token < end; token++) {
        const char *row = (const char *)call->x + token * call->x_stride * size, *gates = row + of->gates_at * size;
        if (of->heads) {
            float *out = (float *)call->out + token * call->out_stride;
            convolve(out, call, token, type);
            prepare(out, of, row, type);
            continue;
        }
        char *out = (char *)call->out + token * call->out_stride * size;
        float sums[of->channels];
        convolve(sums, call, token, type);
        for (int64_t i = 0; i < of->channels; i += LANES) {
            floats sum = rounded_to(load_up_to(sums, i, of->channels - i, FLOAT32), type);
            store_up_to(out, i, of->channels - i, load_up_to(gates, i, of->channels - i, type) * sum, type);
        }
    }
}

/* x: [rows, x_stride]. out: float32, what heads take; without heads the layer's results. scratch: float32 [pieces,
 * kernel - 1, channels]. A unit is a row. */
void pdserve_convolving(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    (void)rows;
    if (call->type == FLOAT32)
        convolve_rows(call, begin, end, FLOAT32);
    else
        convolve_rows(call, begin, end, BFLOAT16);
}

/* Some columns of a memory, row by row. */
struct columns {
    float *at;
    int64_t stride;
};

/* What a token does to a memory: memory = left * memory + k learnt. */
struct update {
    const float *k;
    float left;
    floats learnt[MOST_VECTORS];
};

INLINE floats updated(floats memory, float left, float k, floats learnt) { return memory * left + k * learnt; }

/* Goes through a memory once: updates it, if there is an update, and then reads it with k and with q, if they are there. */
INLINE void pass(
    struct columns to, struct columns from, const struct update *update, const float *k, const float *q, int64_t dim,
    int vectors, floats *by_k, floats *by_q
) {
    floats sums_k[MOST_VECTORS], sums_q[MOST_VECTORS];
    for (int v = 0; v < vectors; v++)
        sums_k[v] = sums_q[v] = splat(0.0f);
    for (int64_t i = 0; i < dim; i++)
        for (int v = 0; v < vectors; v++) {
            floats memory = load_float32(from.at + i * from.stride + v * LANES);
            if (update) {
                memory = updated(memory, update->left, update->k[i], update->learnt[v]);
                store_float32(to.at + i * to.stride + v * LANES, memory);
            }
            if (k)
                sums_k[v] += k[i] * memory;
            if (q)
                sums_q[v] += q[i] * memory;
        }
    for (int v = 0; v < vectors; v++) {
        by_k[v] = sums_k[v];
        by_q[v] = sums_q[v];
    }
}

INLINE float dot(const float *a, const float *b, int64_t dim) {
    floats sums = splat(0.0f);
    for (int64_t i = 0; i < dim; i += LANES)
        sums += load_up_to(a, i, dim - i, FLOAT32) * load_up_to(b, i, dim - i, FLOAT32);
    return sum_of(sums);
}

INLINE void copy_columns(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t dim, int64_t count) {
    for (int64_t i = 0; i < dim; i++)
        memcpy(to + i * to_stride, from + i * from_stride, count * sizeof *to);
}

INLINE int vectors_of(const struct recurrence *of) {
    return of->value_dim >= MOST_VECTORS * LANES ? MOST_VECTORS : VECTORS;
}

/* All tokens of a chunk, in some columns of one head. v becomes what is learnt. */
INLINE void recur(const struct call *call, int64_t unit, int vectors, int corrects) {
    const struct states *states = call->states;
    const struct recurrence *of = call->recurrence;
    const int64_t dim = of->key_dim, width = of->value_dim, most = vectors * LANES, blocks = (width + most - 1) / most;
    const int64_t chunk = unit % states->num_chunks, head = unit / states->num_chunks / blocks;
    const int64_t first = unit / states->num_chunks % blocks * most;
    const int64_t count = width - first < most ? width - first : most;
    const int64_t begin = states->starts[chunk], end = states->starts[chunk + 1], group = head / (of->heads / of->groups);
    const int64_t at = head * dim * width + first, page = states->before[chunk];
    static const float nothing[MOST_VECTORS * LANES];
    float room[end - begin > 1 || count < most ? dim * most : 1];
    const struct columns own = {room, most};
    struct columns from = {(float *)nothing, 0};
    if (page >= 0) {
        from = (struct columns){page_of(states, page) + of->memory_at + at, width};
        if (count < most) {
            memset(room, 0, sizeof room);
            copy_columns(room, most, from.at, width, dim, count);
            from = own;
        }
    }
    struct update update;
    int is_due = 0;
    for (int64_t token = begin; token < end; token++) {
        float *row = (float *)call->x + token * call->x_stride, *v = row + of->v_at + head * width + first;
        const float *q = row + of->q_at + group * dim, *k = row + of->k_at + group * dim;
        const float left = row[of->channels + head], beta = row[of->channels + of->heads + head];
        float *out = (float *)call->out + token * call->out_stride + head * width + first;
        floats by_k[MOST_VECTORS], by_q[MOST_VECTORS];
        if (is_due) {
            pass(own, from, &update, corrects ? k : NULL, q, dim, vectors, by_k, by_q);
            from = own;
        } else {
            pass(own, from, NULL, corrects ? k : NULL, q, dim, vectors, by_k, by_q);
        }
        const float seen = dot(q, k, dim), direct = of->direct ? of->direct[head] : 0.0f;
        for (int i = 0; i < vectors; i++) {
            const int64_t lanes = i * LANES;
            if (lanes >= count) {
                update.learnt[i] = splat(0.0f);
                continue;
            }
            const floats given = load_up_to(v, lanes, count - lanes, FLOAT32);
            update.learnt[i] = beta * (corrects ? given - left * by_k[i] : given);
            floats read = left * by_q[i] + seen * update.learnt[i];
            store_up_to(out, lanes, count - lanes, corrects ? read : read + direct * given, FLOAT32);
            store_up_to(v, lanes, count - lanes, update.learnt[i], FLOAT32);
        }
        update.k = k, update.left = left, is_due = 1;
        const int64_t piece = chunk < states->num_short ? -1 : states->ended[token];
        if (piece < 0)
            continue;
        float *to = (float *)call->scratch + (piece - states->short_pieces) * of->heads * dim * width + at;
        const struct columns kept = count < most ? own : (struct columns){to, width};
        pass(kept, from, &update, NULL, NULL, dim, vectors, by_k, by_q);
        if (count < most)
            copy_columns(to, width, room, most, dim, count);
        from = kept, is_due = 0;
    }
}

/* x: what is convolved. out: float32 [rows, heads * value_dim]. scratch: float32, the memories behind the pieces of
 * chunks that are not short. A unit is some columns of one head in one chunk. */
void pdserve_recurring(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct recurrence *of = call->recurrence;
    const int is_wide = vectors_of(of) == MOST_VECTORS;
    (void)rows;
    for (int64_t unit = begin; unit < end; unit++) {
        if (of->corrects && is_wide)
            recur(call, unit, MOST_VECTORS, 1);
        else if (of->corrects)
            recur(call, unit, VECTORS, 1);
        else if (is_wide)
            recur(call, unit, MOST_VECTORS, 0);
        else
            recur(call, unit, VECTORS, 0);
    }
}

int64_t pdserve_units_recurring(const struct call *call, int64_t rows) {
    const struct recurrence *of = call->recurrence;
    const int64_t most = vectors_of(of) * LANES;
    return (void)rows, call->states->num_chunks * of->heads * ((of->value_dim + most - 1) / most);
}

/* Tokens of a short chunk, in one head: where the memory behind each goes (NULL: nowhere), what it brings and leaves. */
struct tokens {
    float *to[MOST_SHORT];
    const float *k[MOST_SHORT], *learnt[MOST_SHORT];
    float left[MOST_SHORT];
    int count; /* up to the last one that goes somewhere */
};

INLINE floats load_or_nothing(const float *from, int64_t j, int64_t width) {
    return from ? load_up_to(from, j, width - j, FLOAT32) : splat(0.0f);
}

INLINE void replay(const float *from, const struct tokens *of, int64_t dim, int64_t width) {
    for (int64_t i = 0; i < dim; i++)
        for (int64_t j = 0; j < width; j += LANES) {
            floats memory = load_or_nothing(from ? from + i * width : NULL, j, width);
            for (int t = 0; t < of->count; t++) {
                memory = updated(memory, of->left[t], of->k[t][i], load_up_to(of->learnt[t], j, width - j, FLOAT32));
                if (of->to[t])
                    store_up_to(of->to[t] + i * width, j, width - j, memory, FLOAT32);
            }
        }
}

/* As `replay`, of the first token alone, by far the most frequent: here nothing is loaded twice. */
INLINE void replay_one(const float *from, const struct tokens *of, int64_t dim, int64_t width) {
    float *to = of->to[0];
    const float *k = of->k[0], *learnt = of->learnt[0];
    const float left = of->left[0];
    for (int64_t i = 0; i < dim; i++)
        for (int64_t j = 0; j < width; j += LANES) {
            const floats memory = load_or_nothing(from ? from + i * width : NULL, j, width);
            store_up_to(to + i * width, j, width - j,
                        updated(memory, left, k[i], load_up_to(learnt, j, width - j, FLOAT32)), FLOAT32);
        }
}

/* Changes a head's memory as the tokens of a short chunk do, and writes it behind those pieces that are kept. */
INLINE void keep_short(const struct call *call, int64_t chunk, int64_t head) {
    const struct states *states = call->states;
    const struct recurrence *of = call->recurrence;
    const int64_t begin = states->starts[chunk], dim = of->key_dim, width = of->value_dim;
    const int64_t at = of->memory_at + head * dim * width, group = head / (of->heads / of->groups);
    const float *from = states->before[chunk] < 0 ? NULL : page_of(states, states->before[chunk]) + at;
    struct tokens tokens = {.count = 0};
    for (int64_t token = begin; token < states->starts[chunk + 1]; token++) {
        const int place = (int)(token - begin);
        const int64_t page = states->ended[token] < 0 ? -1 : states->pages[states->ended[token]];
        const float *row = (const float *)call->x + token * call->x_stride;
        tokens.k[place] = row + of->k_at + group * dim;
        tokens.learnt[place] = row + of->v_at + head * width;
        tokens.left[place] = row[of->channels + head];
        tokens.to[place] = page < 0 ? NULL : page_of(states, page) + at;
        if (page >= 0)
            tokens.count = place + 1;
    }
    if (tokens.count == 1)
        replay_one(from, &tokens, dim, width);
    else
        replay(from, &tokens, dim, width);
}

/* Writes the last inputs of a piece, of this rank's channels. */
INLINE void keep_inputs(float *kept, const float *inputs, const struct recurrence *of) {
    for (int64_t place = 0; place < of->kernel - 1; place++)
        for (int64_t i = 0; i < of->num_runs; i++) {
            const struct run run = of->runs[i];
            memcpy(kept + place * of->kept_width + run.offset + run.begin, inputs + place * of->channels + run.begin,
                   (run.end - run.begin) * sizeof *kept);
        }
}

/* Puts states into their pages. x: what is convolved, with what is learnt in the place of v. residual: float32 [pieces,
 * kernel - 1, channels]. scratch: as in `pdserve_recurring`. A unit is the last inputs of a piece, or one head of a short
 * chunk, or one head behind another piece. */
void pdserve_keeping(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct states *states = call->states;
    const struct recurrence *of = call->recurrence;
    const int64_t inputs = (of->kernel - 1) * of->channels, memory = of->key_dim * of->value_dim;
    const int64_t num_short = states->num_short * of->heads;
    (void)rows;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t of_head = unit - states->num_pieces;
        if (of_head >= 0 && of_head < num_short) {
            keep_short(call, of_head / of->heads, of_head % of->heads);
            continue;
        }
        of_head -= num_short;
        const int64_t piece = of_head < 0 ? unit : states->short_pieces + of_head / of->heads;
        if (states->pages[piece] < 0)
            continue;
        float *to = page_of(states, states->pages[piece]);
        if (of_head < 0)
            keep_inputs(to + of->kept_at, (const float *)call->residual + piece * inputs, of);
        else
            memcpy(to + of->memory_at + of_head % of->heads * memory, (const float *)call->scratch + of_head * memory,
                   memory * sizeof *to);
    }
}

int64_t pdserve_units_keeping(const struct call *call, int64_t rows) {
    const struct states *states = call->states;
    const int64_t with_heads = states->num_short + states->num_pieces - states->short_pieces;
    return (void)rows, states->num_pieces + with_heads * call->recurrence->heads;
}
