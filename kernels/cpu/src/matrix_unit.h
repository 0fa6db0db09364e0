/* Products of bfloat16 on a processor's matrix unit (Intel AMX): 16 rows times 16 outputs, 32 inputs at once.
 *
 * Weights lie as products_bfloat16.c has them for vectors: 16 pairs of inputs of 16 outputs are a tile of the unit as they
 * are. The sum of an output depends on its row alone, not on how many rows there are beside it.
 */

#ifndef PDSERVE_MATRIX_UNIT_H
#define PDSERVE_MATRIX_UNIT_H

#include "products.h"
#include "unit_tiles.h"

#define MOST_UNIT_ROWS (2 * UNIT_ROWS) /* whose sums the unit holds at once */

#if defined(HAS_MATRIX_UNIT)

/* Registers 0 and 1 hold the sums of the first 16 rows, 2 and 3 those of the others; 4 and 5 their inputs; 6 and 7 weights. */
static void configure_unit(int64_t rows) {
    const uint8_t first = rows < UNIT_ROWS ? rows : UNIT_ROWS, others = rows - first;
    configure_tiles((const uint8_t[]){first, first, others, others, first, others, UNIT_ROWS, UNIT_ROWS});
}

/* Adds the products of 32 inputs. x_bytes: from row to row. */
INLINE void add_on_unit(const char *weights, const char *x, int64_t x_bytes, const int has_others) {
    _tile_loadd(6, weights, 4 * TILE);
    _tile_loadd(4, x, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + 2 * TILE, 4 * TILE);
    _tile_dpbf16ps(1, 4, 7);
    if (has_others) {
        _tile_loadd(5, x + UNIT_ROWS * x_bytes, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* The same for the last inputs, fewer than 32. Weights and rows are filled up with zeros, which add nothing. */
static void add_last_on_unit(const char *weights, const char *x, int64_t x_bytes, int64_t rows, int64_t count) {
    char pairs[UNIT_INPUTS * 2 * TILE] = {0}, from[MOST_UNIT_ROWS][2 * UNIT_INPUTS] = {{0}};
    memcpy(pairs, weights, count * 2 * TILE);
    for (int64_t row = 0; row < rows; row++)
        memcpy(from[row], x + row * x_bytes, count * 2);
    finish_writes(pairs);
    if (rows > UNIT_ROWS)
        add_on_unit(pairs, from[0], sizeof from[0], 1);
    else
        add_on_unit(pairs, from[0], sizeof from[0], 0);
}

INLINE void zero_sums(const int has_others) {
    _tile_zero(0);
    _tile_zero(1);
    if (has_others) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

INLINE void load_sums(const float *sums, const int has_others) {
    _tile_loadd(0, sums, 4 * TILE);
    _tile_loadd(1, sums + UNIT_ROWS, 4 * TILE);
    if (has_others) {
        _tile_loadd(2, sums + UNIT_ROWS * TILE, 4 * TILE);
        _tile_loadd(3, sums + UNIT_ROWS * TILE + UNIT_ROWS, 4 * TILE);
    }
}

INLINE void store_sums(float *sums, const int has_others) {
    _tile_stored(0, sums, 4 * TILE);
    _tile_stored(1, sums + UNIT_ROWS, 4 * TILE);
    if (has_others) {
        _tile_stored(2, sums + UNIT_ROWS * TILE, 4 * TILE);
        _tile_stored(3, sums + UNIT_ROWS * TILE + UNIT_ROWS, 4 * TILE);
    }
}

/* Some inputs of up to 32 rows, for which the unit is configured. */
struct unit_inputs {
    const char *weights; /* of the first one */
    const uint16_t *x;
    int64_t x_stride, count, rows;
    int64_t ahead;    /* from each of the weights to what is asked for early, or 0 */
    int64_t is_first; /* of a row's: sums begin with them */
};

/* Adds their products to sums [rows][32]. */
INLINE void sum_on_unit(float *sums, const struct unit_inputs *of, const int has_others) {
    const char *weights = of->weights, *x = (const char *)of->x;
    const int64_t x_bytes = 2 * of->x_stride, step = UNIT_INPUTS * 2 * TILE;
    if (of->is_first)
        zero_sums(has_others);
    else
        load_sums(sums, has_others);
    for (int64_t i = 0; i < of->count / UNIT_INPUTS; i++, weights += step, x += 2 * UNIT_INPUTS) {
        for (int64_t line = 0; of->ahead && line < step; line += 64)
            __builtin_prefetch(weights + of->ahead + line, 0, 2);
        add_on_unit(weights, x, x_bytes, has_others);
    }
    if (of->count % UNIT_INPUTS)
        add_last_on_unit(weights, x, x_bytes, of->rows, of->count % UNIT_INPUTS);
    store_sums(sums, has_others);
}

#endif

#endif
