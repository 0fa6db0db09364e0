/* Products with quantized weights: codes of 4 or 8 bits, and for each 32 of an output's inputs a scale and a minimum.
 *
 * A weight is minimum + scale * code. Inputs are coded too, 8 bits and a scale for each 32, so that the sum over 32 is one
 * of integers; sums of blocks are added in float32, in order. A tile holds, for each block of 32 inputs, the codes of 32
 * outputs, their 32 scales and their 32 minimums (float16). Codes come in steps of 4 inputs: [2][steps][16 outputs][4]; with
 * 4 bits a step's high halves are the inputs 16 further on.
 */

#include "products.h"

#define BLOCK 32
#if defined(__AVX512VNNI__)
#define MOST_ROWS 6
#else
#define MOST_ROWS 2 /* there are fewer registers */
#endif
#define STREAMED_ROWS 2 /* up to here memory is the limit, and the next tile is asked for early */
#define SCALES_BYTES (TILE * 2)

typedef uint8_t bytes __attribute__((vector_size(64)));
typedef int8_t codes __attribute__((vector_size(16)));

/* A call's inputs in codes, in its scratch. */
struct coded {
    const struct call *call;
    float *scales; /* [rows, blocks, 2]: a block's scale, and that times the sum of its codes */
    int8_t *codes; /* [rows, inputs] */
};

INLINE int64_t block_bytes(int bits) { return BLOCK * TILE * bits / 8 + 2 * SCALES_BYTES; }

INLINE floats float16s(const uint8_t *from) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
#elif defined(__F16C__)
    const __m256 halves[2] = {
        _mm256_cvtph_ps(_mm_loadu_si128((const void *)from)),
        _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + 16))),
    };
    return load_float32((const float *)halves);
#else
    halfwords raw;
    memcpy(&raw, from, sizeof raw);
    words bits = __builtin_convertvector(raw, words), magnitude = (bits & 0x7fff) << 13;
    ints not_finite = (ints)magnitude >= 0x7c00 << 13;
    words sized = (words)((floats)magnitude * 0x1p112f); /* the exponent's bias is 15 in float16, 127 in float32 */
    return (floats)(sized | ((words)not_finite & 0x7f800000) | (bits & 0x8000) << 16);
#endif
}

/* Adds to each lane the products of its 4 codes and 4 inputs. */
INLINE ints dot(ints sums, bytes weights, int32_t inputs) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(inputs));
#elif defined(__AVX2__)
    const __m256i low = _mm256_set1_epi32(((int8_t)inputs & 0xffff) | ((int32_t)(int8_t)(inputs >> 16) << 16));
    const __m256i high = _mm256_set1_epi32(((int8_t)(inputs >> 8) & 0xffff) | ((inputs >> 24) << 16));
    __m256i halves[2], out[2];
    memcpy(halves, &weights, sizeof halves);
    for (int i = 0; i < 2; i++) {
        __m256i even = _mm256_and_si256(halves[i], _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(halves[i], 8);
        out[i] = _mm256_add_epi32(_mm256_madd_epi16(even, low), _mm256_madd_epi16(odd, high));
    }
    ints products;
    memcpy(&products, out, sizeof products);
    return sums + products;
#else
    for (int i = 0; i < 4; i++)
        sums += ((ints)((words)weights >> (8 * i)) & 255) * (int32_t)(int8_t)(inputs >> (8 * i));
    return sums;
#endif
}

INLINE float largest(floats value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    return max_of(value);
#endif
}

INLINE int32_t total(ints value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)value);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += value[lane];
    return sum;
#endif
}

INLINE ints rounded(floats value) { return (ints)(value + 12582912.0f) - 0x4b400000; /* 1.5 * 2^23 */ }

INLINE void code_block(int8_t *out, float *scale, const char *x, int64_t index, int type) {
    floats first = load(x, index, type), second = load(x, index + LANES, type);
    floats sizes = larger((floats)((ints)first & 0x7fffffff), (floats)((ints)second & 0x7fffffff));
    floats zeros = (first + second) * 0.0f; /* NaN where an input is not finite: comparisons would lose it */
    float most = total(zeros != zeros) ? NAN : largest(sizes);
    float times = most > 0.0f ? 127.0f / most : 0.0f;
    ints a = rounded(first * times), b = rounded(second * times);
    codes coded[2] = {__builtin_convertvector(a, codes), __builtin_convertvector(b, codes)};
    memcpy(out, coded, sizeof coded);
    scale[0] = most / 127.0f;
    scale[1] = scale[0] * (float)total(a + b);
}

INLINE struct coded coded_of(const struct call *call, int64_t rows) {
    float *scales = call->scratch;
    return (struct coded){call, scales, (int8_t *)(scales + rows * (call->inputs / BLOCK) * 2)};
}

INLINE void code_row(const struct coded *to, int64_t row, int type) {
    const struct call *call = to->call;
    const int64_t inputs = call->inputs, blocks = inputs / BLOCK;
    const char *x = (const char *)call->x + row * call->x_stride * size_of(type);
    for (int64_t block = 0; block < blocks; block++)
        code_block(
            to->codes + row * inputs + block * BLOCK, to->scales + (row * blocks + block) * 2, x, block * BLOCK, type
        );
}

/* A unit is a row. The product that follows has the same inputs and scratch. */
void pdserve_coding(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct coded coded = coded_of(call, rows);
    for (int64_t row = begin; row < end; row++) {
        if (call->type == FLOAT32)
            code_row(&coded, row, FLOAT32);
        else
            code_row(&coded, row, BFLOAT16);
    }
}

/* Kept out of `multiply`, of which there are as many as there are counts of rows. */
static __attribute__((noinline)) void finish_row(
    const struct call *call, int64_t row, int64_t tile, floats first, floats second
) {
    if (call->type == FLOAT32)
        finish(call, row, tile, first, second, FLOAT32);
    else
        finish(call, row, tile, first, second, BFLOAT16);
}

INLINE void multiply_block(ints *sums, const uint8_t *weights, const int8_t *x, int64_t x_stride, int rows, int bits) {
    const int steps = bits; /* of 64 bytes: 4 inputs of 16 outputs, or with 4 bits 8 */
#pragma GCC unroll 8
    for (int step = 0; step < steps; step++) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            bytes both;
            memcpy(&both, weights + (half * steps + step) * sizeof both, sizeof both);
            bytes low = bits == 4 ? both & 15 : both, high = both >> 4;
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                int32_t inputs[2];
                memcpy(&inputs[0], x + r * x_stride + 4 * step, 4);
                sums[2 * r + half] = dot(sums[2 * r + half], low, inputs[0]);
                if (bits == 4) {
                    memcpy(&inputs[1], x + r * x_stride + LANES + 4 * step, 4);
                    sums[2 * r + half] = dot(sums[2 * r + half], high, inputs[1]);
                }
            }
        }
    }
}

INLINE void multiply(const struct coded *coded, int64_t row, int64_t tile, const int rows, const int bits) {
    floats results[2 * MOST_ROWS];
#pragma GCC unroll 12
    for (int i = 0; i < 2 * rows; i++)
        results[i] = splat(0.0f);
    const int64_t inputs = coded->call->inputs, blocks = inputs / BLOCK, tile_bytes = blocks * block_bytes(bits);
    const uint8_t *here = (const uint8_t *)coded->call->weights + tile * tile_bytes;
    const int8_t *x = coded->codes + row * inputs;
    const float *scales = coded->scales + row * blocks * 2;
    for (int64_t block = 0; block < blocks; block++, here += block_bytes(bits), x += BLOCK, scales += 2) {
        if (rows <= STREAMED_ROWS)
            for (int64_t line = 0; line < block_bytes(bits); line += 64)
                __builtin_prefetch(here + tile_bytes + line, 0, 2);
        ints sums[2 * MOST_ROWS];
#pragma GCC unroll 12
        for (int i = 0; i < 2 * rows; i++)
            sums[i] = (ints)splat(0.0f);
        multiply_block(sums, here, x, inputs, rows, bits);
        const uint8_t *after = here + BLOCK * TILE * bits / 8;
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            floats scale = float16s(after + half * LANES * 2);
            floats minimum = float16s(after + SCALES_BYTES + half * LANES * 2);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const float *of_row = scales + r * blocks * 2;
                results[2 * r + half] += minimum * of_row[1];
                results[2 * r + half] += __builtin_convertvector(sums[2 * r + half], floats) * (scale * of_row[0]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        finish_row(coded->call, row + r, tile, results[2 * r], results[2 * r + 1]);
}

#define CASE(rows) \
    case rows: \
        multiply(coded, row, tile, rows, bits); \
        break;

INLINE void multiply_some(const struct coded *coded, int64_t row, int64_t tile, int64_t rows, const int bits) {
    switch (rows) {
        CASE(1) CASE(2)
#if MOST_ROWS > 2
        CASE(3) CASE(4) CASE(5) CASE(6)
#endif
    }
}

static void multiply_4_bits(const struct coded *coded, int64_t row, int64_t tile, int64_t rows) {
    multiply_some(coded, row, tile, rows, 4);
}

static void multiply_8_bits(const struct coded *coded, int64_t row, int64_t tile, int64_t rows) {
    multiply_some(coded, row, tile, rows, 8);
}

/* Whether the processor sums products of bytes by itself. */
int64_t pdserve_multiplies_bytes(void) {
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

int64_t pdserve_units_quantized(const struct call *call, int64_t rows) { return units_of(call, rows, MOST_ROWS); }

/* inputs: a multiple of 32, which are coded already; weights: as above, of 4 or 8 bits. */
void pdserve_product_quantized(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct coded coded = coded_of(call, rows);
    const int64_t tiles = tiles_of(call), parts = parts_of(rows, MOST_ROWS), parts_of_block = BLOCK_ROWS / MOST_ROWS;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t part = unit / tiles * parts_of_block, last = part + parts_of_block;
        for (; part < last && part < parts; part++) {
            int64_t row = part * rows / parts, count = (part + 1) * rows / parts - row;
            (call->bits == 4 ? multiply_4_bits : multiply_8_bits)(&coded, row, unit % tiles, count);
        }
    }
}

INLINE void decode_row(char *out, const uint8_t *tile, int64_t lane, int64_t inputs, int bits, int type) {
    for (int64_t block = 0; block < inputs / BLOCK; block++, tile += block_bytes(bits)) {
        const uint8_t *after = tile + BLOCK * TILE * bits / 8, *of_half = tile + lane / LANES * (BLOCK * LANES * bits / 8);
        float scale = float16s(after + lane / LANES * LANES * 2)[lane % LANES];
        float minimum = float16s(after + SCALES_BYTES + lane / LANES * LANES * 2)[lane % LANES];
        for (int64_t half = 0; half < BLOCK; half += LANES) {
            floats values;
            for (int64_t i = 0; i < LANES; i++) {
                int64_t input = bits == 4 ? i : half + i;
                uint8_t code = of_half[input / 4 * 64 + lane % LANES * 4 + input % 4];
                values[i] = (float)(bits == 4 ? half ? code >> 4 : code & 15 : code);
            }
            store(out, block * BLOCK + half, minimum + scale * values, type);
        }
    }
}

/* Decodes rows of the matrix that a call's x names. */
void pdserve_lookup_quantized(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const int64_t *ids = call->x, inputs = call->inputs, tile_bytes = inputs / BLOCK * block_bytes((int)call->bits);
    (void)rows;
    for (int64_t row = begin; row < end; row++) {
        const uint8_t *tile = (const uint8_t *)call->weights + ids[row] / TILE * tile_bytes;
        char *to = (char *)call->out + row * call->out_stride * size_of((int)call->type);
        decode_row(to, tile, ids[row] % TILE, inputs, (int)call->bits, (int)call->type);
    }
}
