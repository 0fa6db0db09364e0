/* The products of one block of 32 inputs: sums of integers, by the instructions that a processor has for them. */

#ifndef PDSERVE_BLOCK_PRODUCTS_H
#define PDSERVE_BLOCK_PRODUCTS_H

#include "codes.h"
#include "products.h"

#define MOST_SUMS 12 /* vectors that are summed at once */

typedef uint8_t bytes __attribute__((vector_size(BYTES)));

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

/* Codes of 4 bits: integers as they are; floats (MXFP4's, a sign, two bits of an exponent and one of a mantissa) as 12
 * more than twice their value, which is 0 to 24. */
INLINE bytes levels_of(bytes codes, int fp4) {
    if (!fp4)
        return codes;
#if defined(__AVX512BW__)
    return (bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)FP4_LEVELS)), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)FP4_LEVELS));
    return (bytes)_mm256_shuffle_epi8(levels, (__m256i)codes);
#elif defined(__aarch64__)
    return (bytes)vqtbl1q_u8(vld1q_u8(FP4_LEVELS), (uint8x16_t)codes);
#else
    bytes size = codes & 7; /* twice the value of which is itself, but for 5, 6 and 7 */
    size += ((bytes)(size == 5) & 1) + ((bytes)(size == 6) & 2) + ((bytes)(size == 7) & 5);
    bytes is_negative = (bytes)(codes > 7);
    return 12 + ((size ^ is_negative) - is_negative);
#endif
}

/* What the sums of a block begin with: what `dot` leaves out of codes that it takes less 128. */
INLINE ints begin_block(const int8_t *x, int bits) {
    int32_t sum = 0;
    for (int i = 0; SIGNED_CODES && bits == 8 && i < BLOCK; i++)
        sum += x[i];
    return (ints){0} + 128 * sum;
}

#if defined(__AVX2__)

/* The same sums, in a register: compilers that reorder sums of integers keep all of their terms on the stack. */
INLINE ints kept(ints sums) {
    __asm__("" : "+v"(sums));
    return sums;
}

#endif

#if defined(__AVX2__) && !defined(__AVX512F__)

/* Adds to each half of a lane the products of 2 codes of 4 bits and 2 inputs: 8 times without an overflow. */
INLINE ints dot_halves(ints sums, bytes weights, ints inputs) {
    return kept((ints)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)weights, (__m256i)inputs)));
}

INLINE ints join_halves(ints sums, int16_t times) {
    return (ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(times));
}

/* Adds to sums [rows][parts] the products of one block, for vectors of outputs from `first` on. Codes of 8 bits are
 * taken as two of 4. */
INLINE void multiply_block(
    ints *sums, const uint8_t *weights, const int8_t *x, int64_t x_stride, int first, int rows, int parts, int bits,
    int fp4
) {
    const int steps = bits; /* of 64 bytes: 4 inputs of 16 outputs, or with 4 bits 8 */
    const int most_steps = fp4 ? 2 : steps; /* whose sums of halves fit: of floats' levels half as many */
#pragma GCC unroll 8
    for (int part = 0; part < parts; part++) {
        const int output = (first + part) * LANES;
        ints lows[MOST_SUMS], highs[MOST_SUMS];
        for (int r = 0; r < rows; r++)
            lows[r] = highs[r] = (ints){0};
#pragma GCC unroll 8
        for (int step = 0; step < steps; step++) {
            words both;
            memcpy(&both, weights + (output / HALF_TILE * steps + step) * 64 + output % HALF_TILE * 4, sizeof both);
            bytes low = levels_of((bytes)(both & 0x0f0f0f0f), fp4), high = levels_of((bytes)(both >> 4 & 0x0f0f0f0f), fp4);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                int32_t inputs[2];
                memcpy(&inputs[0], x + r * x_stride + 4 * step, 4);
                memcpy(&inputs[1], x + r * x_stride + (bits == 4 ? BLOCK / 2 : 0) + 4 * step, 4);
                lows[r] = dot_halves(lows[r], low, inputs[0] - (ints){0});
                ints *other = bits == 4 ? &lows[r] : &highs[r];
                *other = dot_halves(*other, high, inputs[1] - (ints){0});
            }
            if ((step + 1) % most_steps == 0)
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    sums[r * parts + part] += join_halves(lows[r], 1) + (bits == 4 ? (ints){0} : join_halves(highs[r], 16));
                    lows[r] = highs[r] = (ints){0};
                }
        }
    }
}

#else

/* Adds to sums [rows][parts] the products of one block, for vectors of outputs from `first` on. */
INLINE void multiply_block(
    ints *sums, const uint8_t *weights, const int8_t *x, int64_t x_stride, int first, int rows, int parts, int bits,
    int fp4
) {
    const int steps = bits; /* of 64 bytes: 4 inputs of 16 outputs, or with 4 bits 8 */
#pragma GCC unroll 8
    for (int step = 0; step < steps; step++) {
#pragma GCC unroll 8
        for (int part = 0; part < parts; part++) {
            const int output = (first + part) * LANES;
            bytes both;
            memcpy(&both, weights + (output / HALF_TILE * steps + step) * 64 + output % HALF_TILE * 4, sizeof both);
            bytes low = bits == 4 ? levels_of(both & 15, fp4) : SIGNED_CODES ? both ^ 128 : both;
            bytes high = levels_of(both >> 4, fp4);
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

#if WORDS

/* Adds to each lane the products of a pair of codes and a pair of inputs. */
INLINE ints dot_words(ints sums, words weights, int32_t inputs) {
#if defined(__AVX512BW__)
    return kept(sums + (ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(inputs)));
#else
    return kept(sums + (ints)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(inputs)));
#endif
}

/* A code in each word: what `levels_of` makes of it. The highest bit of a byte makes 0 of the other one. */
INLINE words levels_of_words(words codes, int fp4) {
    return fp4 ? (words)levels_of((bytes)(codes | 0x80008000), fp4) : codes;
}

/* The same as `multiply_block`, for inputs of 16 bits. x_stride: in bytes. */
INLINE void multiply_words(
    ints *sums, const uint8_t *weights, const int8_t *x, int64_t x_stride, int first, int rows, int parts, int bits,
    int fp4
) {
    const int steps = bits, pairs = bits == 4 ? 4 : 2; /* of inputs in a step */
#pragma GCC unroll 8
    for (int step = 0; step < steps; step++) {
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs; pair++) {
            const int odd = pair % 2, further = pair / 2;
            const int shift = 8 * odd + 4 * further, at = 2 * (4 * step + 2 * odd + BLOCK / 2 * further);
            words taken[PARTS];
#pragma GCC unroll 8
            for (int part = 0; part < parts; part++) {
                const int output = (first + part) * LANES;
                words all;
                memcpy(&all, weights + (output / HALF_TILE * steps + step) * 64 + output % HALF_TILE * 4, sizeof all);
                taken[part] = levels_of_words(all >> shift & (bits == 4 ? 0x000f000f : 0x00ff00ff), fp4);
            }
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                int32_t inputs;
                memcpy(&inputs, x + r * x_stride + at, 4);
#pragma GCC unroll 8
                for (int part = 0; part < parts; part++)
                    sums[r * parts + part] = dot_words(sums[r * parts + part], taken[part], inputs);
            }
        }
    }
}

#endif

/* Lines of 8-bit codes of one row. */
INLINE int lines_of(int input_bits) { return input_bits == 16 && !WORDS ? 2 : 1; }

/* Puts into sums [rows][parts] the products of one block, for vectors of outputs from `first` on. x: rows' codes. */
INLINE void multiply_inputs(
    ints *sums, const uint8_t *weights, const int8_t *x, int64_t inputs, int first, int rows, int parts, int bits,
    int fp4, int input_bits
) {
    const int lines = lines_of(input_bits);
#if WORDS
    if (input_bits == 16) {
#pragma GCC unroll 12
        for (int i = 0; i < rows * parts; i++)
            sums[i] = (ints){0};
        multiply_words(sums, weights, x, 2 * inputs, first, rows, parts, bits, fp4);
        return;
    }
#endif
#pragma GCC unroll 12
    for (int i = 0; i < rows * lines * parts; i++)
        sums[i] = begin_block(x + i / parts * inputs, bits);
    multiply_block(sums, weights, x, inputs, first, rows * lines, parts, bits, fp4);
    if (lines == 2) /* high parts of codes, then low ones */
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int part = 0; part < parts; part++)
                sums[r * parts + part] = sums[2 * r * parts + part] * 256 + sums[(2 * r + 1) * parts + part];
}

#endif
