/* What all matrix products share: how rows and outputs are cut into pieces of work, and what is done with the sums.
 *
 * Outputs come in tiles of 32, two vectors. Threads take contiguous runs of tiles, so that each streams the weights. The
 * sum for an output is accumulated in the same order whatever the number of rows: a row's result depends on it alone.
 */

#ifndef PDSERVE_PRODUCTS_H
#define PDSERVE_PRODUCTS_H

#include "calls.h"
#include "vectors.h"

#define TILE (2 * LANES)
#define BLOCK_ROWS 240 /* whose activations stay in a core's cache while all weights pass by */

/* What becomes of sums, as kernels/cpu/products.py numbers it. With GATED, a tile holds 16 gates and their 16 ups. */
enum { PLAIN = 0, ADDED = 1, GATED = 2 };

INLINE int64_t tiles_of(const struct call *to) {
    int64_t each = to->after == GATED ? LANES : TILE;
    return (to->width + each - 1) / each;
}

INLINE floats load_up_to(const char *from, int64_t index, int64_t count, int type) {
    return count >= LANES ? load(from, index, type) : load_part(from, index, count, type);
}

INLINE void store_up_to(char *out, int64_t index, int64_t count, floats value, int type) {
    if (count >= LANES)
        store(out, index, value, type);
    else
        store_part(out, index, count, value, type);
}

INLINE void finish_half(const struct call *to, int64_t row, int64_t column, floats sums, int type) {
    int64_t left = to->width - column;
    if (left <= 0)
        return;
    if (to->bias)
        sums += load_up_to(to->bias, column, left, type);
    if (to->after == ADDED)
        sums += load_up_to(to->residual + row * to->residual_stride * size_of(type), column, left, type);
    store_up_to(to->out + row * to->out_stride * size_of(type), column, left, sums, type);
}

/* Writes one row of one tile. first, second: its sums. */
INLINE void finish(const struct call *to, int64_t row, int64_t tile, floats first, floats second, int type) {
    if (to->after != GATED) {
        finish_half(to, row, tile * TILE, first, type);
        finish_half(to, row, tile * TILE + LANES, second, type);
        return;
    }
    int64_t column = tile * LANES;
    if (to->bias) {
        first += load_up_to(to->bias, 2 * column, LANES, type);
        second += load_up_to(to->bias, 2 * column + LANES, LANES, type);
    }
    floats gated = first / (1.0f + exp_of(-first)) * second;
    store_up_to(to->out + row * to->out_stride * size_of(type), column, to->width - column, gated, type);
}

/* Cuts `rows` into parts of at most `most` rows, as even as can be. */
INLINE int64_t parts_of(int64_t rows, int64_t most) { return (rows + most - 1) / most; }

/* A unit is one tile for one block of rows; a block's tiles follow one another. */
INLINE int64_t units_of(const struct call *call, int64_t rows, int64_t most) {
    return tiles_of(call) * parts_of(parts_of(rows, most), BLOCK_ROWS / most);
}

#endif
