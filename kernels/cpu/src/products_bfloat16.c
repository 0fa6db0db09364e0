/* Products with weights in bfloat16, or in FP8 (e4m3), by dot products of pairs.
 *
 * A tile holds, for each pair of inputs, the pairs of 32 outputs: [tiles][inputs / 2][32][2]. In FP8 it is cut into
 * segments of 128 inputs, or fewer in the last one: 32 scales (float32), then the pairs. One stream of weights serves up
 * to MOST_ROWS rows at once.
 */

#include <stddef.h>

#include "fp8.h"
#include "products.h"

#if defined(HAS_PAIRS)
#define MOST_ROWS 12
#else
#define MOST_ROWS 4 /* widened, they lie on the stack */
#endif
#define STREAMED_ROWS 4 /* up to here memory is the limit, and the next tile is asked for early */
#define SEGMENT 128     /* inputs of FP8 that share an output's scale */
#define SCALES_BYTES (TILE * 4)

/* Kept out of `multiply`, of which there are as many as there are counts of rows. */
static __attribute__((noinline)) void finish_row(const struct call *to, int64_t row, int64_t tile, const floats *sums) {
    if (to->out_type == FLOAT32)
        finish(to, row, tile, sums, FLOAT32);
    else
        finish(to, row, tile, sums, BFLOAT16);
}

INLINE int64_t tile_bytes(const struct call *call, int bytes) {
    return call->inputs * TILE * bytes + (bytes == 1 ? (call->inputs + SEGMENT - 1) / SEGMENT * SCALES_BYTES : 0);
}

/* Puts into sums [rows][parts] the products of `count` inputs; weights: of the first pair. bytes: of a weight. */
INLINE void sum_pairs(
    floats *sums, const char *weights, const element *x, int64_t x_stride, int64_t count, int64_t tile_bytes,
    const int rows, const int parts, const int bytes
) {
#pragma GCC unroll 24
    for (int i = 0; i < rows * parts; i++)
        sums[i] = splat(0.0f);
    for (int64_t pair = 0; pair < count / 2; pair++) {
        const char *here = weights + pair * 2 * TILE * bytes;
        pairs columns[PARTS];
        if (bytes == 1)
            load_fp8_pairs(columns, here, parts);
#pragma GCC unroll 8
        for (int part = 0; part < parts; part++) {
            if (bytes == 2)
                columns[part] = load_pairs(here + part * 4 * LANES);
            if (rows <= STREAMED_ROWS && part * LANES * bytes % 32 == 0)
                __builtin_prefetch(here + tile_bytes + part * 2 * LANES * bytes, 0, 2);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            pairs both = splat_pair(x + r * x_stride + 2 * pair);
#pragma GCC unroll 8
            for (int part = 0; part < parts; part++)
                sums[r * parts + part] = add_products(sums[r * parts + part], columns[part], both);
        }
    }
}

/* Sums of `parts` vectors of a tile from `first` on: out [rows]. */
INLINE void sum_parts(
    floats out[][PARTS], const struct call *call, const element *x, int64_t x_stride, int64_t tile, int first,
    const int rows, const int parts, const int bytes
) {
    const int64_t each = tile_bytes(call, bytes);
    const char *here = (const char *)call->weights + tile * each;
    floats sums[SUM_REGISTERS];
    if (bytes == 2) {
        sum_pairs(sums, here + first * 4 * LANES, x, x_stride, call->inputs, each, rows, parts, bytes);
    } else {
        floats segment[SUM_REGISTERS];
        for (int i = 0; i < rows * parts; i++)
            sums[i] = splat(0.0f);
        for (int64_t input = 0; input < call->inputs; input += SEGMENT) {
            const int64_t left = call->inputs - input, count = left < SEGMENT ? left : SEGMENT;
            const float *scales = (const float *)here + first * LANES;
            here += SCALES_BYTES;
            sum_pairs(segment, here + first * 2 * LANES, x + input, x_stride, count, each, rows, parts, bytes);
            here += count * TILE;
            for (int i = 0; i < rows * parts; i++)
                sums[i] += segment[i] * load_float32(scales + i % parts * LANES);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int part = 0; part < parts; part++)
            out[r][first + part] = sums[r * parts + part];
}

INLINE void multiply(const struct call *call, int64_t row, int64_t tile, const int rows, const int bytes) {
    const int parts = parts_at_once(rows);
    const int64_t inputs = call->inputs;
    const uint16_t *from = (const uint16_t *)call->x + row * call->x_stride;
    element room[rows][WIDENED(inputs)];
    const element *x = widened(room[0], from, inputs);
    for (int r = 1; r < rows; r++)
        widened(room[r], from + r * call->x_stride, inputs);
    floats sums[MOST_ROWS][PARTS];
    for (int first = 0; first < PARTS; first += parts)
        sum_parts(sums, call, x, x == room[0] ? inputs : call->x_stride, tile, first, rows, parts, bytes);
    for (int r = 0; r < rows; r++)
        finish_row(call, row + r, tile, sums[r]);
}

#define CASE(rows) \
    case rows: \
        multiply(call, row, tile, rows, bytes); \
        break;

INLINE void multiply_rows(const struct call *call, int64_t row, int64_t tile, int64_t rows, const int bytes) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if MOST_ROWS > 4
        CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

static void multiply_bfloat16(const struct call *call, int64_t row, int64_t tile, int64_t rows) {
    multiply_rows(call, row, tile, rows, 2);
}

static void multiply_fp8(const struct call *call, int64_t row, int64_t tile, int64_t rows) {
    multiply_rows(call, row, tile, rows, 1);
}

/* Whether products take no longer than float32's, as far as that was measured. */
int64_t pdserve_multiplies_bfloat16(void) {
#if defined(HAS_PAIRS) || (defined(__AVX2__) && !defined(__AVX512F__))
    return 1;
#else
    return 0;
#endif
}

int64_t pdserve_units_bfloat16(const struct call *call, int64_t rows) { return units_of(call, rows, MOST_ROWS); }

/* inputs: an even number, at most 32,768; weights: as above. */
void pdserve_product_bfloat16(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const int64_t tiles = tiles_of(call), parts = parts_of(rows, MOST_ROWS), parts_of_block = BLOCK_ROWS / MOST_ROWS;
    void (*multiply_some)(const struct call *, int64_t, int64_t, int64_t) =
        call->bits == 8 ? multiply_fp8 : multiply_bfloat16;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t part = unit / tiles * parts_of_block, last = part + parts_of_block;
        for (; part < last && part < parts; part++) {
            int64_t row = part * rows / parts;
            multiply_some(call, row, unit % tiles, (part + 1) * rows / parts - row);
        }
    }
}

int64_t pdserve_units_heads(const struct call *call, int64_t rows) {
    return call->num_heads * pdserve_units_bfloat16(call, rows);
}

/* Multiplies some inputs of each row with each head's own tiles, which follow one another. No bias, no residual. */
void pdserve_product_heads(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const int64_t units = pdserve_units_bfloat16(call, rows), head_bytes = tiles_of(call) * TILE * call->inputs * 2;
    struct call of;
    memcpy(&of, call, offsetof(struct call, taken));
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t head = unit / units;
        of.x = (char *)call->x + head * call->x_head * 2;
        of.out = (char *)call->out + head * call->width * 2;
        of.weights = (const char *)call->weights + head * head_bytes;
        pdserve_product_bfloat16(&of, rows, unit % units, unit % units + 1);
    }
}

/* Copies rows of the matrix that a call's x names, times the scale. width: rows of the matrix. */
void pdserve_lookup_bfloat16(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const int64_t *ids = call->x, pairs = call->inputs / 2;
    (void)rows;
    for (int64_t row = begin; row < end; row++) {
        const int64_t id = ids[row] - call->first;
        char *to = (char *)call->out + row * call->out_stride * 2;
        if (id < 0 || id >= call->width) {
            memset(to, 0, (size_t)call->inputs * 2);
            continue;
        }
        const uint32_t *from = (const uint32_t *)call->weights + id / TILE * TILE * pairs + id % TILE;
        for (int64_t pair = 0; pair < pairs; pair++)
            memcpy(to + 4 * pair, from + pair * TILE, 4);
        scale_row(to, call->inputs, (float)call->scale, BFLOAT16);
    }
}
