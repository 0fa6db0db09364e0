/* Products of experts: each computes the slots of the rows that have chosen it, and no other expert is read.
 *
 * A call's units are known before a step is routed: so they are shares of the work, as even as can be, whatever rows
 * choose. The products are those of other matrices, for an expert's slots: a row's result depends on that row alone. */

#include <stddef.h>

#include "codes.h"
#include "chosen.h"
#include "products.h"

#define MOST_SHARES 240 /* of the work of a call: a few for each thread, and at most as many as team.c counts */
#define COST_ROWS 16    /* that cost as much as reading the weights, about */
#define SUM_COLUMNS 1024 /* of a unit */

int64_t pdserve_units_grouping(const struct call *call, int64_t rows) { return (void)call, rows > 0; }

/* Puts slots in order. One unit: it takes about a nanosecond a slot. */
void pdserve_grouping(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct chosen chosen = chosen_of(call, rows);
    const int64_t count = call->mixture.num_experts, slots = rows * call->mixture.num_chosen;
    int64_t *counts = call->mixture.counts;
    int32_t next[count];
    (void)begin, (void)end;
    memset(next, 0, sizeof next);
    for (int64_t i = 0; i < slots; i++)
        next[chosen.experts[i]]++;
    chosen.firsts[0] = chosen.costs[0] = 0;
    for (int64_t expert = 0; expert < count; expert++) {
        const int32_t taken = next[expert], first = chosen.firsts[expert];
        chosen.firsts[expert + 1] = first + taken;
        chosen.costs[expert + 1] = chosen.costs[expert] + (taken + COST_ROWS - 1) / COST_ROWS;
        next[expert] = first;
        if (counts)
            counts[expert] += taken;
    }
    for (int64_t i = 0; i < slots; i++) {
        const int32_t expert = chosen.experts[i], slot = next[expert]++;
        chosen.places[i] = slot;
        chosen.rows[slot] = (int32_t)(i / call->mixture.num_chosen);
        chosen.slot_experts[slot] = expert;
    }
}

/* Whether an expert's inputs are coded, as its weights are. */
INLINE int codes_inputs(const struct call *call) { return call->bits == 4 || (call->bits == 8 && !call->is_float); }

INLINE int64_t coded_bytes(const struct call *call) { return call->inputs * call->input_bits / 8 + call->inputs / 4; }

/* The call of one expert, over its slots. */
static struct call call_of(const struct call *call, const struct chosen *chosen, int64_t expert) {
    const int64_t first = chosen->firsts[expert], width = call->after == GATED ? tiles_of(call) * TILE : call->width;
    struct call of;
    memcpy(&of, call, offsetof(struct call, taken));
    of.x = (char *)call->x + first * call->x_stride * size_of((int)call->type);
    of.out = (char *)call->out + first * call->out_stride * size_of((int)call->out_type);
    of.weights = (const char *)call->weights + expert * call->mixture.expert_bytes;
    of.bias = call->bias ? (const char *)call->bias + expert * width * size_of((int)call->out_type) : NULL;
    of.scratch = codes_inputs(call) ? (char *)call->scratch + first * coded_bytes(call) : NULL;
    return of;
}

int64_t pdserve_units_slots(const struct call *call, int64_t rows) { return rows * call->mixture.num_chosen; }

/* Copies a row of codes between places for different numbers of rows. */
INLINE void copy_codes(const struct coded *to, int64_t to_row, const struct coded *from, int64_t from_row) {
    const int64_t scales = from->call->inputs / BLOCK * 2;
    memcpy(to->scales + to_row * scales, from->scales + from_row * scales, scales * sizeof *from->scales);
    memcpy(to->codes + to_row * from->row_bytes, from->codes + from_row * from->row_bytes, from->row_bytes);
}

/* Gives each slot a copy of its row: of x in out, or where weights are codes of x's codes, which are in x, in scratch. A
 * unit is a slot. */
void pdserve_gathering(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct chosen chosen = chosen_of(call, rows);
    const int64_t size = size_of((int)call->type);
    struct call given;
    memcpy(&given, call, offsetof(struct call, taken));
    given.scratch = call->x;
    for (int64_t slot = begin; slot < end; slot++) {
        const int64_t expert = chosen.slot_experts[slot], first = chosen.firsts[expert], row = chosen.rows[slot];
        if (codes_inputs(call)) {
            const struct call of = call_of(call, &chosen, expert);
            const struct coded from = coded_of(&given, rows), to = coded_of(&of, chosen.firsts[expert + 1] - first);
            copy_codes(&to, slot - first, &from, row);
        } else {
            memcpy((char *)call->out + slot * call->out_stride * size,
                   (const char *)call->x + row * call->x_stride * size, call->inputs * size);
        }
    }
}

/* Codes the inputs of experts, as `pdserve_coding` does. A unit is a slot. */
void pdserve_experts_coding(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct chosen chosen = chosen_of(call, rows);
    for (int64_t slot = begin; slot < end; slot++) {
        const int64_t expert = chosen.slot_experts[slot], first = chosen.firsts[expert];
        const struct call of = call_of(call, &chosen, expert);
        pdserve_coding(&of, chosen.firsts[expert + 1] - first, slot - first, slot - first + 1);
    }
}

int64_t pdserve_units_experts(const struct call *call, int64_t rows) {
    const int64_t slots = rows * call->mixture.num_chosen, count = call->mixture.num_experts;
    const int64_t tiles = tiles_of(call) * (slots < count ? slots : count);
    return tiles < MOST_SHARES ? tiles : MOST_SHARES;
}

/* Multiplies an expert's slots with some of its tiles, one block of slots after the other. */
static void multiply_tiles(const struct call *call, const struct chosen *chosen, int64_t expert, int64_t begin, int64_t end) {
    const struct call of = call_of(call, chosen, expert);
    const int64_t slots = chosen->firsts[expert + 1] - chosen->firsts[expert], tiles = tiles_of(call);
    const int is_plain = !codes_inputs(call);
    const int64_t units = is_plain ? pdserve_units_bfloat16(&of, slots) : pdserve_units_quantized(&of, slots);
    for (int64_t block = 0; block < units; block += tiles) {
        if (is_plain)
            pdserve_product_bfloat16(&of, slots, block + begin, block + end);
        else
            pdserve_product_quantized(&of, slots, block + begin, block + end);
    }
}

/* The first tile of an expert that costs begin at `position` or after it. */
INLINE int64_t tile_from(int64_t position, int64_t each, int64_t tiles) {
    const int64_t tile = position > 0 ? (position + each - 1) / each : 0;
    return tile < tiles ? tile : tiles;
}

/* x, out: of slots. A unit is the share of the work whose tiles' costs, all experts' one after the other, begin in it. */
void pdserve_experts(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct chosen chosen = chosen_of(call, rows);
    const int64_t count = call->mixture.num_experts, tiles = tiles_of(call), units = pdserve_units_experts(call, rows);
    const int64_t total = chosen.costs[count] * tiles, from = begin * total / units, to = end * total / units;
    for (int64_t expert = 0; expert < count; expert++) {
        const int64_t each = chosen.costs[expert + 1] - chosen.costs[expert], start = chosen.costs[expert] * tiles;
        if (!each || start + each * tiles <= from)
            continue;
        if (start >= to)
            break;
        const int64_t first = tile_from(from - start, each, tiles), last = tile_from(to - start, each, tiles);
        if (first < last)
            multiply_tiles(call, &chosen, expert, first, last);
    }
}

INLINE int64_t column_blocks(const struct call *call) { return (call->width + SUM_COLUMNS - 1) / SUM_COLUMNS; }

int64_t pdserve_units_summing(const struct call *call, int64_t rows) { return rows * column_blocks(call); }

/* out_type: of the results, the residual and what the shared expert has made; type: of what experts have made. */
INLINE void sum_row(
    const struct call *call, const struct chosen *chosen, int64_t row, int64_t begin, int64_t end, int type, int out_type
) {
    const struct mixture *of = &call->mixture;
    const float *shares = chosen->shares + row * of->num_chosen, gate = of->shared_gates ? of->shared_gates[row] : 0.0f;
    const int32_t *places = chosen->places + row * of->num_chosen;
    const float shared = of->shared_gates ? 1.0f / (1.0f + expf(-gate)) : 1.0f, scale = (float)call->scale;
    const char *residual = (const char *)call->residual + row * call->residual_stride * size_of(out_type);
    char *out = (char *)call->out + row * call->out_stride * size_of(out_type);
    for (int64_t i = begin; i < end; i += LANES) {
        const int64_t left = end - i;
        floats sum = splat(0.0f);
        for (int64_t each = 0; each < of->num_chosen; each++)
            sum += shares[each] * load_up_to(call->x, places[each] * call->x_stride + i, left, type);
        if (of->shared)
            sum += shared * load_up_to(of->shared, row * call->width + i, left, out_type);
        sum *= scale;
        if (call->residual)
            sum += load_up_to(residual, i, left, out_type);
        store_up_to(out, i, left, sum, out_type);
    }
}

/* Sums what a row's experts have made, in the order of the experts, by its shares; then come what the shared expert has
 * made, the scale and the residual. x: [slots, width]. A unit is some columns of a row. */
void pdserve_summing(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct chosen chosen = chosen_of(call, rows);
    const int64_t blocks = column_blocks(call);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t row = unit / blocks, first = unit % blocks * SUM_COLUMNS, after = first + SUM_COLUMNS;
        const int64_t last = after < call->width ? after : call->width;
        if (call->out_type == FLOAT32)
            sum_row(call, &chosen, row, first, last, FLOAT32, FLOAT32);
        else if (call->type == FLOAT32)
            sum_row(call, &chosen, row, first, last, FLOAT32, BFLOAT16);
        else
            sum_row(call, &chosen, row, first, last, BFLOAT16, BFLOAT16);
    }
}
