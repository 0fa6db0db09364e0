/* Rows of K and V in a byte a value: codes, then a scale in float32. kernels/kv_rows.py says what they mean. */

#ifndef PDSERVE_KV_ROWS_H
#define PDSERVE_KV_ROWS_H

#include "vectors.h"

/* After the types of vectors.h, as kernels/cpu/attention.py numbers them. */
enum { KV_INT8 = 2, KV_E4M3 = 3 };

#define LEAST_CODED 0x1p-100f
#define INFINITE 0x7f800000

typedef int8_t codes_of_lanes __attribute__((vector_size(LANES)));

INLINE int is_coded(int kv) { return kv >= KV_INT8; }

/* The codes of some values of a row, as numbers. Those of KV_E4M3 are 2^-8 of what they stand for: float16, which
 * processors convert, has the next exponent's range. */
INLINE floats load_codes(const char *row, int64_t index, int kv) {
#if defined(__AVX512F__) && defined(__AVX2__)
    __m128i raw = _mm_loadu_si128((const void *)(row + index));
    if (kv == KV_INT8)
        return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), 7);
    return (floats)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((int16_t)0xbfff)));
#elif defined(__AVX2__) && defined(__F16C__) && LANES == 8
    __m128i raw = _mm_loadl_epi64((const void *)(row + index));
    if (kv == KV_INT8)
        return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw));
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(raw), 7);
    return (floats)_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((int16_t)0xbfff)));
#else
    codes_of_lanes raw;
    memcpy(&raw, row + index, sizeof raw);
    ints wide = __builtin_convertvector(raw, ints);
    if (kv == KV_INT8)
        return __builtin_convertvector(wide, floats);
    floats size = (floats)((wide & 0x7f) << 20) * 0x1p112f; /* the exponent's bias is 7 in e4m3, 127 in float32 */
    return (floats)((ints)size | (wide & (int32_t)0x80000000));
#endif
}

/* Some elements of a row, as numbers. kv: KV_INT8, KV_E4M3, or the type of values without codes. */
INLINE floats load_kv(const char *row, int64_t index, int kv) {
    return is_coded(kv) ? load_codes(row, index, kv) : load(row, index, kv);
}

/* What the codes of a row are to be multiplied with. */
INLINE float scale_of(const char *row, int64_t dim, int kv) {
    float scale;
    memcpy(&scale, row + dim, sizeof scale);
    return kv == KV_E4M3 ? scale * 256.0f : scale;
}

/* Rounds to e4m3, to the nearest, ties to even. Magnitudes are at most 448 and the rounding of a division. */
INLINE ints e4m3_of(floats value) {
    words bits = (words)value, size = bits & 0x7fffffff;
    words normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    words small = (words)((floats)size + 16384.0f) - 0x46800000; /* units of 2^14 are 2^-9, as those below 2^-6 */
    ints is_small = (ints)size < 0x3c800000;
    return (ints)((bits >> 24 & 0x80) | ((words)is_small & small) | ((words)~is_small & normal));
}

INLINE ints int8_of(floats value) { return (ints)(value + 12582912.0f) - 0x4b400000; /* 1.5 * 2^23 */ }

/* Writes a row of `type` as codes and scale. dim: a multiple of LANES. */
INLINE void pack_row(char *to, const char *from, int64_t dim, int type, int kv) {
    ints most = {0}; /* bits of magnitudes are in their order, infinity and NaN behind all others */
    for (int64_t i = 0; i < dim; i += LANES) {
        ints size = (ints)load(from, i, type) & 0x7fffffff;
        most = (ints)choose(size > most, (floats)size, (floats)most);
    }
    int32_t greatest = 0;
    for (int lane = 0; lane < LANES; lane++)
        greatest = most[lane] > greatest ? most[lane] : greatest;
    float scale;
    memcpy(&scale, &greatest, sizeof scale);
    const int is_kept = scale >= LEAST_CODED && greatest < INFINITE;
    scale = is_kept ? scale / (kv == KV_INT8 ? 127.0f : 448.0f) : greatest < INFINITE ? 0.0f : NAN;
    for (int64_t i = 0; i < dim; i += LANES) {
        floats scaled = load(from, i, type) / scale;
        ints whole = kv == KV_INT8 ? int8_of(scaled) : e4m3_of(scaled);
        codes_of_lanes codes = __builtin_convertvector(is_kept ? whole : (ints){0}, codes_of_lanes);
        memcpy(to + i, &codes, sizeof codes);
    }
    memcpy(to + dim, &scale, sizeof scale);
}

#endif
