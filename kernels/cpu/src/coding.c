/* Codes the inputs of quantized products: see codes.h. */

#include "codes.h"

typedef int8_t bytes_of_lanes __attribute__((vector_size(LANES)));

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

/* The largest magnitude of a block, or NaN if an input is not finite: comparisons of magnitudes would lose it. */
INLINE float most_of(const char *x, int64_t index, int type) {
    floats sizes = splat(0.0f);
    ints broken = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        floats inputs = load(x, index + i, type), zeros = inputs * 0.0f;
        sizes = larger((floats)((ints)inputs & 0x7fffffff), sizes);
        broken |= zeros != zeros;
    }
    return total(broken) ? NAN : max_of(sizes);
}

INLINE void put_bytes(int8_t *out, ints whole) {
    bytes_of_lanes coded = __builtin_convertvector(whole, bytes_of_lanes);
    memcpy(out, &coded, sizeof coded);
}

/* Puts the third of each four codes beside the first. */
INLINE void put_words(int8_t *out, const int32_t *whole) {
    for (int i = 0; i < BLOCK; i += 4) {
        uint32_t pairs[2] = {(whole[i] & 0xffff) | (uint32_t)whole[i + 2] << 16,
                             (whole[i + 1] & 0xffff) | (uint32_t)whole[i + 3] << 16};
        memcpy(out + 2 * i, pairs, sizeof pairs);
    }
}

/* low: the line of low parts, if there is one. */
INLINE void code_block(int8_t *out, int8_t *low, float *scale, const char *x, int64_t index, int type, int bits) {
    const float most = most_of(x, index, type), most_code = bits == 8 ? MOST_CODE_8 : MOST_CODE_16;
    const float times = most > 0.0f ? most_code / most : 0.0f;
    int32_t codes[BLOCK];
    ints sum = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        ints whole = rounded(load(x, index + i, type) * times);
        sum += whole;
        if (bits == 8) {
            put_bytes(out + i, whole);
        } else if (WORDS) {
            memcpy(codes + i, &whole, sizeof whole);
        } else {
            ints high = (whole + 128) >> 8;
            put_bytes(out + i, high);
            put_bytes(low + i, whole - (high << 8));
        }
    }
    if (bits == 16 && WORDS)
        put_words(out, codes);
    scale[0] = most / most_code;
    scale[1] = scale[0] * (float)total(sum);
}

INLINE void code_row(const struct coded *to, int64_t row, int type, int bits) {
    const struct call *call = to->call;
    const int64_t inputs = call->inputs, blocks = inputs / BLOCK, block_bytes = bits == 16 && WORDS ? 2 * BLOCK : BLOCK;
    const char *x = (const char *)call->x + row * call->x_stride * size_of(type);
    int8_t *out = to->codes + row * to->row_bytes;
    for (int64_t block = 0; block < blocks; block++, out += block_bytes)
        code_block(out, out + inputs, to->scales + (row * blocks + block) * 2, x, block * BLOCK, type, bits);
}

/* A unit is a row. The product that follows has the same inputs and scratch. */
void pdserve_coding(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct coded coded = coded_of(call, rows);
    for (int64_t row = begin; row < end; row++) {
        if (call->type == FLOAT32 && call->input_bits == 16)
            code_row(&coded, row, FLOAT32, 16);
        else if (call->type == FLOAT32)
            code_row(&coded, row, FLOAT32, 8);
        else if (call->input_bits == 16)
            code_row(&coded, row, BFLOAT16, 16);
        else
            code_row(&coded, row, BFLOAT16, 8);
    }
}
