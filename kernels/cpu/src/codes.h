/* The inputs of quantized products, in codes of 8 or 16 bits and a scale for each 32.
 *
 * Codes of 16 bits have the same values everywhere, and one of two layouts:
 * - WORDS, for products of 16-bit words: a row is one line of words. Each four inputs are in the order first, third,
 *   second, fourth, because masks and shifts turn four bytes of weights into a pair of the first and third, and a pair
 *   of the others.
 * - otherwise, for products of bytes: a row is two lines of bytes, the high parts of all codes, then the low ones. A code
 *   is 256 * high + low, and both parts are signed. */

#ifndef PDSERVE_CODES_H
#define PDSERVE_CODES_H

#include "calls.h"
#include "vectors.h"

#define BLOCK 32
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__) || defined(__AVX2__) && !defined(__AVX512F__)
#define WORDS 1
#else
#define WORDS 0
#endif
#define MOST_CODE_8 127
#define MOST_CODE_16 (127 * 256) /* its high part is 127 at most */

static const uint8_t FP4_LEVELS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* A call's inputs in codes, in its scratch. */
struct coded {
    const struct call *call;
    float *scales; /* [rows, blocks, 2]: a block's scale, and that times the sum of its codes */
    int8_t *codes; /* [rows, row_bytes] */
    int64_t row_bytes;
};

INLINE struct coded coded_of(const struct call *call, int64_t rows) {
    float *scales = call->scratch;
    int8_t *codes = (int8_t *)(scales + rows * (call->inputs / BLOCK) * 2);
    return (struct coded){call, scales, codes, call->inputs * call->input_bits / 8};
}

#endif
