/* Products with quantized weights: codes of 4 or 8 bits, or floats of 4 bits, and for each 32 of an output's inputs a scale and a minimum.
 *
 * A weight is minimum + scale * code. Inputs are coded too (see codes.h), with a scale for each 32, so that the sum over
 * 32 is one of integers; sums of blocks are added in float32, in order. A tile holds, for each block of 32 inputs, the
 * codes of 32 outputs, their 32 scales and their 32 minimums (float16). Codes come in steps of 4 inputs:
 * [2][steps][16 outputs][4]; with 4 bits a step's high halves are the inputs 16 further on.
 */

#include "block_products.h"

#if defined(__AVX512VNNI__) || defined(__aarch64__)
#define MOST_ROWS 6
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define MOST_ROWS 4
#else
#define MOST_ROWS 2 /* there are fewer registers */
#endif
#if WORDS /* how many rows of inputs of 16 bits */
#define WIDE_ROWS 4
#else
#define WIDE_ROWS (MOST_ROWS / 2)
#endif
#define STREAMED_ROWS 2 /* up to here memory is the limit, and the next tile is asked for early */
#define SCALES_BYTES (TILE * 2)

INLINE int64_t block_bytes(int bits) { return BLOCK * TILE * bits / 8 + 2 * SCALES_BYTES; }

struct tile {
    const uint8_t *weights;
    const int8_t *x;
    const float *scales;
    int64_t inputs;
};

/* Sums of `parts` vectors of a tile from `first` on. */
INLINE void sum_parts(
    floats out[][PARTS], const struct tile *tile, int first, const int rows, const int parts, const int bits,
    const int fp4, const int input_bits
) {
    const int64_t inputs = tile->inputs, blocks = inputs / BLOCK, tile_bytes = blocks * block_bytes(bits);
    const uint8_t *here = tile->weights;
    const int8_t *x = tile->x;
    const float *scales = tile->scales;
    floats results[MOST_SUMS];
#pragma GCC unroll 12
    for (int i = 0; i < rows * parts; i++)
        results[i] = splat(0.0f);
    for (int64_t block = 0; block < blocks; block++, here += block_bytes(bits), scales += 2) {
        if (rows <= STREAMED_ROWS && first == 0)
            for (int64_t line = 0; line < block_bytes(bits); line += 64)
                __builtin_prefetch(here + tile_bytes + line, 0, 2);
        ints sums[MOST_SUMS];
        multiply_inputs(sums, here, x, inputs, first, rows, parts, bits, fp4, input_bits);
        x += BLOCK * input_bits / 8 / lines_of(input_bits);
        const uint8_t *after = here + BLOCK * TILE * bits / 8 + first * LANES * 2;
#pragma GCC unroll 8
        for (int part = 0; part < parts; part++) {
            floats scale = load_float16(after + part * LANES * 2);
            floats minimum = load_float16(after + SCALES_BYTES + part * LANES * 2);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const float *of_row = scales + r * blocks * 2;
                floats *result = &results[r * parts + part];
                *result += minimum * of_row[1];
                *result += __builtin_convertvector(sums[r * parts + part], floats) * (scale * of_row[0]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int part = 0; part < parts; part++)
            out[r][first + part] = results[r * parts + part];
}

/* How many vectors of a tile are summed at once where inputs are words, whose sums take one register each. */
INLINE int parts_of_words(int rows) {
    return PARTS * rows <= MOST_SUMS ? PARTS : PARTS / 2 * rows <= MOST_SUMS ? PARTS / 2 : (PARTS + 3) / 4;
}

INLINE void multiply(
    const struct coded *coded, int64_t row, int64_t tile, const int rows, const int bits, const int fp4,
    const int input_bits
) {
    const int64_t inputs = coded->call->inputs, blocks = inputs / BLOCK;
    const struct tile at = {
        (const uint8_t *)coded->call->weights + tile * blocks * block_bytes(bits), coded->codes + row * coded->row_bytes,
        coded->scales + row * blocks * 2, inputs,
    };
    const int parts = WORDS && input_bits == 16 ? parts_of_words(rows) : parts_at_once(2 * lines_of(input_bits) * rows);
    floats sums[MOST_ROWS > WIDE_ROWS ? MOST_ROWS : WIDE_ROWS][PARTS];
    for (int first = 0; first < PARTS; first += parts)
        sum_parts(sums, &at, first, rows, parts, bits, fp4, input_bits);
    finish(coded->call, row, tile, sums, rows);
}

#define CASE(rows) \
    case rows: \
        if (rows <= (input_bits == 8 ? MOST_ROWS : WIDE_ROWS)) \
            multiply(coded, row, tile, rows, bits, fp4, input_bits); \
        break;

INLINE void multiply_some(
    const struct coded *coded, int64_t row, int64_t tile, int64_t rows, const int bits, const int fp4,
    const int input_bits
) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
    }
}

typedef void multiplying(const struct coded *coded, int64_t row, int64_t tile, int64_t rows);

#define MULTIPLYING(name, bits, fp4, input_bits) \
    static void name(const struct coded *coded, int64_t row, int64_t tile, int64_t rows) { \
        multiply_some(coded, row, tile, rows, bits, fp4, input_bits); \
    }

MULTIPLYING(multiply_4_by_8, 4, 0, 8)
MULTIPLYING(multiply_4_by_16, 4, 0, 16)
MULTIPLYING(multiply_8_by_8, 8, 0, 8)
MULTIPLYING(multiply_8_by_16, 8, 0, 16)
MULTIPLYING(multiply_fp4_by_8, 4, 1, 8)
MULTIPLYING(multiply_fp4_by_16, 4, 1, 16)

/* Whether the processor sums products of bytes by itself. */
int64_t pdserve_multiplies_bytes(void) {
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
    return 1;
#else
    return 0;
#endif
}

INLINE int64_t most_rows(const struct call *call) { return call->input_bits == 8 ? MOST_ROWS : WIDE_ROWS; }

int64_t pdserve_units_quantized(const struct call *call, int64_t rows) {
    return units_of(call, rows, most_rows(call));
}

/* inputs: a multiple of 32, which are coded already; weights: as above, of 4 or 8 bits. */
void pdserve_product_quantized(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    static multiplying *const by_bits[3][2] = {
        {multiply_4_by_8, multiply_4_by_16}, {multiply_8_by_8, multiply_8_by_16}, {multiply_fp4_by_8, multiply_fp4_by_16}
    };
    multiplying *multiply_rows = by_bits[call->is_float ? 2 : call->bits == 8][call->input_bits == 16];
    const struct coded coded = coded_of(call, rows);
    const int64_t tiles = tiles_of(call), parts = parts_of(rows, most_rows(call));
    const int64_t parts_of_block = BLOCK_ROWS / most_rows(call);
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t part = unit / tiles * parts_of_block, last = part + parts_of_block;
        for (; part < last && part < parts; part++) {
            int64_t row = part * rows / parts, count = (part + 1) * rows / parts - row;
            multiply_rows(&coded, row, unit % tiles, count);
        }
    }
}

INLINE void decode_row(char *out, const uint8_t *tile, int64_t lane, int64_t inputs, int bits, int fp4, int type) {
    const int64_t half = lane / HALF_TILE, in_half = lane % HALF_TILE, vector = lane / LANES * LANES * 2;
    for (int64_t block = 0; block < inputs / BLOCK; block++, tile += block_bytes(bits)) {
        const uint8_t *after = tile + BLOCK * TILE * bits / 8, *of_half = tile + half * (BLOCK * HALF_TILE * bits / 8);
        float scale = load_float16(after + vector)[lane % LANES];
        float minimum = load_float16(after + SCALES_BYTES + vector)[lane % LANES];
        for (int64_t first = 0; first < BLOCK; first += LANES) {
            floats values = {0};
            for (int64_t i = 0; i < LANES; i++) {
                int64_t input = bits == 4 ? (first + i) % 16 : first + i;
                uint8_t code = of_half[input / 4 * 64 + in_half * 4 + input % 4];
                code = bits == 8 ? code : first < 16 ? code & 15 : code >> 4;
                values[i] = (float)(fp4 ? FP4_LEVELS[code] : code);
            }
            store(out, block * BLOCK + first, minimum + scale * values, type);
        }
    }
}

/* Decodes rows of the matrix that a call's x names, times the scale. */
void pdserve_lookup_quantized(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const int64_t *ids = call->x, inputs = call->inputs, tile_bytes = inputs / BLOCK * block_bytes((int)call->bits);
    (void)rows;
    for (int64_t row = begin; row < end; row++) {
        const int64_t id = ids[row] - call->first;
        char *to = (char *)call->out + row * call->out_stride * size_of((int)call->type);
        if (id < 0 || id >= call->width) {
            memset(to, 0, (size_t)(inputs * size_of((int)call->type)));
            continue;
        }
        const uint8_t *tile = (const uint8_t *)call->weights + id / TILE * tile_bytes;
        decode_row(to, tile, id % TILE, inputs, (int)call->bits, (int)call->is_float, (int)call->type);
        scale_row(to, inputs, (float)call->scale, (int)call->type);
    }
}
