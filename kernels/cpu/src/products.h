/* What all matrix products share: how rows and outputs are cut into units of work, and what is done with the sums.
 *
 * Outputs come in tiles of 32, which are some vectors of the processor's own width. Threads take contiguous runs of
 * tiles, so that each streams the weights. An output's sum is accumulated in the same order for any number of rows: a
 * row's result depends on that row alone.
 */

#ifndef PDSERVE_PRODUCTS_H
#define PDSERVE_PRODUCTS_H

#include <stddef.h>

#include "activations.h"
#include "calls.h"
#include "vectors.h"

#define TILE 32
#define HALF_TILE 16
#define PARTS (TILE / LANES) /* vectors of a tile */
#define BLOCK_ROWS 240 /* whose activations stay in a core's cache while all weights pass by */
#if defined(__AVX512F__) || defined(__aarch64__)
#define SUM_REGISTERS 24 /* of 32 */
#else
#define SUM_REGISTERS 8 /* of 16 */
#endif

/* What is done with sums, as kernels/cpu/layers.py numbers it. With GATED, a tile holds 16 gates and their 16 ups. */
enum { PLAIN = 0, ADDED = 1, GATED = 2 };

/* How many vectors of a tile are summed at once, where each takes so many registers. */
INLINE int parts_at_once(int registers) {
    return PARTS * registers <= SUM_REGISTERS       ? PARTS
           : PARTS / 2 * registers <= SUM_REGISTERS ? PARTS / 2
                                                    : (PARTS + 3) / 4;
}

INLINE int64_t tiles_of(const struct call *to) {
    int64_t each = to->after == GATED ? HALF_TILE : TILE;
    return (to->width + each - 1) / each;
}

INLINE void finish_part(const struct call *to, int64_t row, int64_t column, floats sums, int type) {
    int64_t left = to->width - column;
    if (left <= 0)
        return;
    if (to->bias)
        sums += load_up_to(to->bias, column, left, type);
    sums = activated(to, sums) * (float)to->scale;
    if (to->cap > 0)
        sums = tanh_of(sums / (float)to->cap) * (float)to->cap;
    if (to->after == ADDED)
        sums += load_up_to(to->residual + row * to->residual_stride * size_of(type), column, left, type);
    store_up_to(to->out + row * to->out_stride * size_of(type), column, left, sums, type);
}

/* first: of the gates in the tiles. */
INLINE void finish_gated(
    const struct call *to, int64_t row, int64_t column, int64_t first, floats gates, floats ups, int type
) {
    int64_t left = to->width - column;
    if (left <= 0)
        return;
    if (to->bias) {
        gates += load(to->bias, first, type);
        ups += load(to->bias, first + HALF_TILE, type);
    }
    store_up_to(to->out + row * to->out_stride * size_of(type), column, left, gated_of(to, gates, ups), type);
}

/* Rows of one tile. */
INLINE void finish_rows(
    const struct call *to, int64_t row, int64_t tile, const floats sums[][PARTS], int64_t rows, const int gated,
    const int type
) {
    for (int64_t r = 0; r < rows; r++)
        for (int part = 0; part < (gated ? PARTS / 2 : PARTS); part++)
            if (gated)
                finish_gated(to, row + r, tile * HALF_TILE + part * LANES, tile * TILE + part * LANES, sums[r][part],
                             sums[r][part + PARTS / 2], type);
            else
                finish_part(to, row + r, tile * TILE + part * LANES, sums[r][part], type);
}

/* The same where nothing comes after a tile's sums but a residual. */
INLINE void add_rows(
    const struct call *to, int64_t row, int64_t tile, const floats sums[][PARTS], int64_t rows, const int type
) {
    const char *residual = (const char *)to->residual + row * to->residual_stride * size_of(type);
    char *out = (char *)to->out + row * to->out_stride * size_of(type);
    for (int64_t r = 0; r < rows; r++, residual += to->residual_stride * size_of(type), out += to->out_stride * size_of(type))
        for (int part = 0; part < PARTS; part++) {
            floats sum = sums[r][part];
            if (to->after == ADDED)
                sum += load(residual, tile * TILE + part * LANES, type);
            store(out, tile * TILE + part * LANES, sum, type);
        }
}

INLINE void finish_in(
    const struct call *to, int64_t row, int64_t tile, const floats sums[][PARTS], int64_t rows, const int type
) {
    const int is_bare = !to->bias && to->activation == NO_ACTIVATION && to->scale == 1.0 && to->cap == 0;
    if (to->after == GATED)
        finish_rows(to, row, tile, sums, rows, 1, type);
    else if (is_bare && (tile + 1) * TILE <= to->width)
        add_rows(to, row, tile, sums, rows, type);
    else
        finish_rows(to, row, tile, sums, rows, 0, type);
}

/* Writes rows of one tile. sums: [rows][PARTS]. Kept out of `multiply`, of which there are as many as there are counts of
 * rows. */
static __attribute__((noinline, unused)) void finish(
    const struct call *call, int64_t row, int64_t tile, const floats sums[][PARTS], int64_t rows
) {
    struct call to; /* which no store can change */
    memcpy(&to, call, offsetof(struct call, taken));
    if (to.out_type == FLOAT32)
        finish_in(&to, row, tile, sums, rows, FLOAT32);
    else
        finish_in(&to, row, tile, sums, rows, BFLOAT16);
}

/* Multiplies a row that was looked up, in its own type. */
INLINE void scale_row(char *row, int64_t width, float scale, int type) {
    for (int64_t i = 0; scale != 1.0f && i < width; i += LANES)
        store_up_to(row, i, width - i, load_up_to(row, i, width - i, type) * scale, type);
}

/* Cuts `rows` into parts of at most `most` rows, as even as can be. */
INLINE int64_t parts_of(int64_t rows, int64_t most) { return (rows + most - 1) / most; }

/* A unit is one tile for one block of rows; a block's tiles follow one another. */
INLINE int64_t units_of(const struct call *call, int64_t rows, int64_t most) {
    return tiles_of(call) * parts_of(parts_of(rows, most), BLOCK_ROWS / most);
}

#endif
