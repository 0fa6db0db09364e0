/* Products with quantized weights: codes of 4 or 8 bits, and for each 32 of an output's inputs a scale and a minimum.
 *
 * A weight is minimum + scale * code. Inputs are coded too, 8 bits and a scale for each 32, so that the sum over 32 is
 * one of integers; sums of blocks are added in float32, in order. A tile holds, for each block of 32 inputs, the codes of
 * 32 outputs, their 32 scales and their 32 minimums (float16). Codes come in steps of 4 inputs:
 * [2][steps][16 outputs][4]; with 4 bits a step's high halves are the inputs 16 further on.
 */

#include "products.h"

#define BLOCK 32
#if defined(__AVX512VNNI__) || defined(__aarch64__)
#define MOST_ROWS 6
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define MOST_ROWS 4
#else
#define MOST_ROWS 2 /* there are fewer registers */
#endif
#define STREAMED_ROWS 2 /* up to here memory is the limit, and the next tile is asked for early */
#define SCALES_BYTES (TILE * 2)

typedef uint8_t bytes __attribute__((vector_size(BYTES)));
typedef int8_t codes __attribute__((vector_size(LANES)));

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
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
#elif defined(__aarch64__)
    return (floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#else
    halfwords raw;
    memcpy(&raw, from, sizeof raw);
    words bits = __builtin_convertvector(raw, words), magnitude = (bits & 0x7fff) << 13;
    ints not_finite = (ints)magnitude >= 0x7c00 << 13;
    words sized = (words)((floats)magnitude * 0x1p112f); /* the exponent's bias is 15 in float16, 127 in float32 */
    return (floats)(sized | ((words)not_finite & 0x7f800000) | (bits & 0x8000) << 16);
#endif
}

/* Whether `dot` takes codes of 8 bits as signed, less 128. */
#if defined(__aarch64__) && !defined(__ARM_FEATURE_MATMUL_INT8)
#define SIGNED_CODES 1
#else
#define SIGNED_CODES 0
#endif

/* Adds to each lane the products of its 4 codes and 4 inputs. */
INLINE ints dot(ints sums, bytes weights, int32_t inputs) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(inputs));
#elif defined(__AVX512BW__)
    const __m512i low = _mm512_set1_epi32(((int8_t)inputs & 0xffff) | ((int32_t)(int8_t)(inputs >> 16) << 16));
    const __m512i high = _mm512_set1_epi32(((int8_t)(inputs >> 8) & 0xffff) | ((inputs >> 24) << 16));
    __m512i even = (__m512i)weights & _mm512_set1_epi16(255), odd = _mm512_srli_epi16((__m512i)weights, 8);
    return sums + (ints)_mm512_add_epi32(_mm512_madd_epi16(even, low), _mm512_madd_epi16(odd, high));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (ints)vusdotq_s32((int32x4_t)sums, (uint8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(inputs)));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (ints)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(inputs)));
#elif defined(__aarch64__)
    int8x16_t w = (int8x16_t)weights, x = vreinterpretq_s8_s32(vdupq_n_s32(inputs));
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x))), high = vpaddlq_s16(vmull_high_s8(w, x));
    return sums + (ints)vpaddq_s32(low, high);
#else
    for (int i = 0; i < 4; i++)
        sums += ((ints)((words)weights >> (8 * i)) & 255) * (int32_t)(int8_t)(inputs >> (8 * i));
    return sums;
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
    floats sizes = splat(0.0f);
    ints broken = {0}, sum = {0}; /* comparisons of sizes would lose an input that is not finite */
    for (int i = 0; i < BLOCK; i += LANES) {
        floats inputs = load(x, index + i, type), zeros = inputs * 0.0f;
        sizes = larger((floats)((ints)inputs & 0x7fffffff), sizes);
        broken |= zeros != zeros;
    }
    float most = total(broken) ? NAN : max_of(sizes);
    float times = most > 0.0f ? 127.0f / most : 0.0f;
    for (int i = 0; i < BLOCK; i += LANES) {
        ints whole = rounded(load(x, index + i, type) * times);
        codes coded = __builtin_convertvector(whole, codes);
        memcpy(out + i, &coded, sizeof coded);
        sum += whole;
    }
    scale[0] = most / 127.0f;
    scale[1] = scale[0] * (float)total(sum);
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
    const struct call *call, int64_t row, int64_t tile, const floats *sums
) {
    if (call->type == FLOAT32)
        finish(call, row, tile, sums, FLOAT32);
    else
        finish(call, row, tile, sums, BFLOAT16);
}

/* What the sums of a block begin with: what `dot` leaves out of codes that it takes less 128. */
INLINE ints begin_block(const int8_t *x, int bits) {
    int32_t sum = 0;
    for (int i = 0; SIGNED_CODES && bits == 8 && i < BLOCK; i++)
        sum += x[i];
    return (ints){0} + 128 * sum;
}

#if defined(__AVX2__) && !defined(__AVX512F__)

/* Adds to each half of a lane the products of 2 codes of 4 bits and 2 inputs: 8 times without an overflow. */
INLINE ints dot_halves(ints sums, bytes weights, ints inputs) {
    return (ints)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)weights, (__m256i)inputs));
}

INLINE ints join_halves(ints sums, int16_t times) {
    return (ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(times));
}

/* Adds to sums [rows][parts] the products of one block, for vectors of outputs from `first` on. Codes of 8 bits are
 * taken as two of 4. */
INLINE void multiply_block(
    ints *sums, const uint8_t *weights, const int8_t *x, int64_t x_stride, int first, int rows, int parts, int bits
) {
    const int steps = bits; /* of 64 bytes: 4 inputs of 16 outputs, or with 4 bits 8 */
#pragma GCC unroll 8
    for (int part = 0; part < parts; part++) {
        const int output = (first + part) * LANES;
        ints lows[MOST_ROWS], highs[MOST_ROWS];
        for (int r = 0; r < rows; r++)
            lows[r] = highs[r] = (ints){0};
#pragma GCC unroll 8
        for (int step = 0; step < steps; step++) {
            words both;
            memcpy(&both, weights + (output / HALF_TILE * steps + step) * 64 + output % HALF_TILE * 4, sizeof both);
            bytes low = (bytes)(both & 0x0f0f0f0f), high = (bytes)(both >> 4 & 0x0f0f0f0f);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                int32_t inputs[2];
                memcpy(&inputs[0], x + r * x_stride + 4 * step, 4);
                memcpy(&inputs[1], x + r * x_stride + (bits == 4 ? BLOCK / 2 : 0) + 4 * step, 4);
                lows[r] = dot_halves(lows[r], low, inputs[0] - (ints){0});
                ints *other = bits == 4 ? &lows[r] : &highs[r];
                *other = dot_halves(*other, high, inputs[1] - (ints){0});
            }
        }
        for (int r = 0; r < rows; r++)
            sums[r * parts + part] += join_halves(lows[r], 1) + (bits == 4 ? (ints){0} : join_halves(highs[r], 16));
    }
}

#else

/* Adds to sums [rows][parts] the products of one block, for vectors of outputs from `first` on. */
INLINE void multiply_block(
    ints *sums, const uint8_t *weights, const int8_t *x, int64_t x_stride, int first, int rows, int parts, int bits
) {
    const int steps = bits; /* of 64 bytes: 4 inputs of 16 outputs, or with 4 bits 8 */
#pragma GCC unroll 8
    for (int step = 0; step < steps; step++) {
#pragma GCC unroll 8
        for (int part = 0; part < parts; part++) {
            const int output = (first + part) * LANES;
            bytes both;
            memcpy(&both, weights + (output / HALF_TILE * steps + step) * 64 + output % HALF_TILE * 4, sizeof both);
            bytes low = bits == 4 ? both & 15 : SIGNED_CODES ? both ^ 128 : both, high = both >> 4;
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                ints *sum = &sums[r * parts + part];
                int32_t inputs[2];
                memcpy(&inputs[0], x + r * x_stride + 4 * step, 4);
                *sum = dot(*sum, low, inputs[0]);
                if (bits == 4) {
                    memcpy(&inputs[1], x + r * x_stride + BLOCK / 2 + 4 * step, 4);
                    *sum = dot(*sum, high, inputs[1]);
                }
            }
        }
    }
}

#endif

struct tile {
    const uint8_t *weights;
    const int8_t *x;
    const float *scales;
    int64_t inputs;
};

/* Sums of `parts` vectors of a tile from `first` on. */
INLINE void sum_parts(
    floats out[][PARTS], const struct tile *tile, int first, const int rows, const int parts, const int bits
) {
    const int64_t inputs = tile->inputs, blocks = inputs / BLOCK, tile_bytes = blocks * block_bytes(bits);
    const uint8_t *here = tile->weights;
    const int8_t *x = tile->x;
    const float *scales = tile->scales;
    floats results[SUM_REGISTERS / 2];
#pragma GCC unroll 12
    for (int i = 0; i < rows * parts; i++)
        results[i] = splat(0.0f);
    for (int64_t block = 0; block < blocks; block++, here += block_bytes(bits), x += BLOCK, scales += 2) {
        if (rows <= STREAMED_ROWS && first == 0)
            for (int64_t line = 0; line < block_bytes(bits); line += 64)
                __builtin_prefetch(here + tile_bytes + line, 0, 2);
        ints sums[SUM_REGISTERS / 2];
#pragma GCC unroll 12
        for (int i = 0; i < rows * parts; i++)
            sums[i] = begin_block(x + i / parts * inputs, bits);
        multiply_block(sums, here, x, inputs, first, rows, parts, bits);
        const uint8_t *after = here + BLOCK * TILE * bits / 8 + first * LANES * 2;
#pragma GCC unroll 8
        for (int part = 0; part < parts; part++) {
            floats scale = float16s(after + part * LANES * 2);
            floats minimum = float16s(after + SCALES_BYTES + part * LANES * 2);
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

INLINE void multiply(const struct coded *coded, int64_t row, int64_t tile, const int rows, const int bits) {
    const int64_t inputs = coded->call->inputs, blocks = inputs / BLOCK;
    const struct tile at = {
        (const uint8_t *)coded->call->weights + tile * blocks * block_bytes(bits), coded->codes + row * inputs,
        coded->scales + row * blocks * 2, inputs,
    };
    const int parts = parts_at_once(2 * rows);
    floats sums[MOST_ROWS][PARTS];
    for (int first = 0; first < PARTS; first += parts)
        sum_parts(sums, &at, first, rows, parts, bits);
    for (int r = 0; r < rows; r++)
        finish_row(coded->call, row + r, tile, sums[r]);
}

#define CASE(rows) \
    case rows: \
        multiply(coded, row, tile, rows, bits); \
        break;

INLINE void multiply_some(const struct coded *coded, int64_t row, int64_t tile, int64_t rows, const int bits) {
    switch (rows) {
        CASE(1) CASE(2)
#if MOST_ROWS > 2
        CASE(3) CASE(4)
#endif
#if MOST_ROWS > 4
        CASE(5) CASE(6)
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
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
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
    const int64_t half = lane / HALF_TILE, in_half = lane % HALF_TILE, vector = lane / LANES * LANES * 2;
    for (int64_t block = 0; block < inputs / BLOCK; block++, tile += block_bytes(bits)) {
        const uint8_t *after = tile + BLOCK * TILE * bits / 8, *of_half = tile + half * (BLOCK * HALF_TILE * bits / 8);
        float scale = float16s(after + vector)[lane % LANES];
        float minimum = float16s(after + SCALES_BYTES + vector)[lane % LANES];
        for (int64_t first = 0; first < BLOCK; first += LANES) {
            floats values = {0};
            for (int64_t i = 0; i < LANES; i++) {
                int64_t input = bits == 4 ? (first + i) % 16 : first + i;
                uint8_t code = of_half[input / 4 * 64 + in_half * 4 + input % 4];
                values[i] = (float)(bits == 8 ? code : first < 16 ? code & 15 : code >> 4);
            }
            store(out, block * BLOCK + first, minimum + scale * values, type);
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
