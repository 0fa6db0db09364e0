/* Vectors of floats, as wide as a processor has them, and the element types of tensors. */

#ifndef PDSERVE_VECTORS_H
#define PDSERVE_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define BYTES (4 * LANES) /* of a vector of floats */

#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(BYTES)));
typedef int32_t ints __attribute__((vector_size(BYTES)));
typedef uint32_t words __attribute__((vector_size(BYTES)));
typedef uint16_t halfwords __attribute__((vector_size(BYTES / 2)));

/* Element types, as kernels/cpu/library.py numbers them. */
enum { FLOAT32 = 0, BFLOAT16 = 1 };

INLINE floats splat(float value) { return value - (floats){0}; }

INLINE floats choose(ints mask, floats yes, floats no) {
    return (floats)(((ints)yes & mask) | ((ints)no & ~mask));
}

/* b where either is not a number. */
INLINE floats larger(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE floats load_float32(const float *from) {
    floats out;
    memcpy(&out, from, sizeof out);
    return out;
}

INLINE void store_float32(float *to, floats value) { memcpy(to, &value, sizeof value); }

INLINE floats load_bfloat16(const uint16_t *from) {
    halfwords raw;
    memcpy(&raw, from, sizeof raw);
    return (floats)(__builtin_convertvector(raw, words) << 16);
}

INLINE floats load_float16(const void *from) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(from));
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128(from));
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

/* Rounds to the nearest, ties to even; NaN stays NaN. Where there is an instruction, what is below a normal number
 * becomes 0. */
INLINE halfwords to_bfloat16(floats value) {
#if defined(__AVX512BF16__)
    return (halfwords)_mm512_cvtneps_pbh((__m512)value);
#else
    words bits = (words)value;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    ints is_nan = value != value;
    rounded = (rounded & (words)~is_nan) | ((words)is_nan & 0x7fc0);
    return __builtin_convertvector(rounded, halfwords);
#endif
}

INLINE void store_bfloat16(uint16_t *to, floats value) {
    halfwords raw = to_bfloat16(value);
    memcpy(to, &raw, sizeof raw);
}

/* Element access by type. `type` is a constant wherever these are used, so that no branch is left. */

INLINE int64_t size_of(int type) { return type == FLOAT32 ? 4 : 2; }

INLINE floats load(const void *from, int64_t index, int type) {
    return type == FLOAT32 ? load_float32((const float *)from + index) : load_bfloat16((const uint16_t *)from + index);
}

INLINE void store(void *to, int64_t index, floats value, int type) {
    if (type == FLOAT32)
        store_float32((float *)to + index, value);
    else
        store_bfloat16((uint16_t *)to + index, value);
}

INLINE float load_one(const void *from, int64_t index, int type) {
    if (type == FLOAT32)
        return ((const float *)from)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[index] << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

/* Loads and stores `count` < LANES elements; the lanes past them are zero. */
INLINE floats load_part(const void *from, int64_t index, int64_t count, int type) {
    char raw[BYTES] = {0};
    memcpy(raw, (const char *)from + index * size_of(type), count * size_of(type));
    return load(raw, 0, type);
}

INLINE void store_part(void *to, int64_t index, int64_t count, floats value, int type) {
    char raw[BYTES];
    store(raw, 0, value, type);
    memcpy((char *)to + index * size_of(type), raw, count * size_of(type));
}

/* The same of `count` elements, or of a whole vector if there are more. */
INLINE floats load_up_to(const void *from, int64_t index, int64_t count, int type) {
    return count >= LANES ? load(from, index, type) : load_part(from, index, count, type);
}

INLINE void store_up_to(void *out, int64_t index, int64_t count, floats value, int type) {
    if (count >= LANES)
        store(out, index, value, type);
    else
        store_part(out, index, count, value, type);
}

/* The value as an element of `type` holds it. */
INLINE floats rounded_to(floats value, int type) {
    return type == FLOAT32 ? value : (floats)(__builtin_convertvector(to_bfloat16(value), words) << 16);
}

/* Always in this order, so that a sum depends on its terms alone. */
INLINE float sum_of(floats value) {
    float lanes[LANES];
    store_float32(lanes, value);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            lanes[lane] += lanes[lane + width];
    return lanes[0];
}

INLINE float max_of(floats value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float lanes[LANES], most;
    store_float32(lanes, value);
    most = lanes[0];
    for (int lane = 1; lane < LANES; lane++)
        most = lanes[lane] > most ? lanes[lane] : most;
    return most;
#endif
}

/* e^rest - 1, where x = power * ln(2) + rest and |rest| is at most ln(2) / 2. x: from -87.3 to 88.7. */
INLINE floats expm1_of_rest(floats x, ints *power) {
    floats times = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the integer is in the low bits */
    *power = (ints)times - 0x4b400000;
    times -= 12582912.0f;
    floats rest = x - times * 0.693359375f;
    rest -= times * -2.12194440e-4f;
    floats poly = splat(1.9875691500e-4f);
    poly = poly * rest + 1.3981999507e-3f;
    poly = poly * rest + 8.3334519073e-3f;
    poly = poly * rest + 4.1665795894e-2f;
    poly = poly * rest + 1.6666665459e-1f;
    poly = poly * rest + 5.0000001201e-1f;
    return poly * rest * rest + rest;
}

/* e^x to about 2 units in the last place; 0 below -87.3, where float32 loses its precision, infinite above 88.7. */
INLINE floats exp_of(floats given) {
    ints below = given < splat(-87.3f), above = given > splat(88.7f), power;
    floats x = choose(above, splat(88.7f), choose(below, splat(-87.3f), given));
    floats poly = expm1_of_rest(x, &power) + 1.0f;
    floats result = (floats)((ints)poly + (power << 23));
    result = choose(above, splat(INFINITY), (floats)((ints)result & ~below));
    return choose(given != given, given, result);
}

/* 2^x of what is not above 0, to 3e-6 of it: for what bfloat16 will hold. 0 far below what a normal number can be. */
INLINE floats exp2_of_negative(floats given) {
#if defined(__AVX512F__)
    __m512 x = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)given); /* the given one where it is not a number */
    __m512 whole = _mm512_roundscale_ps(x, 0);
    floats rest = (floats)x - (floats)whole;
#else
    ints below = given < splat(-126.0f);
    floats times = choose(below, splat(-126.0f), given) + 12582912.0f; /* 1.5 * 2^23: the integer is in the low bits */
    ints power = (ints)times - 0x4b400000;
    floats rest = choose(below, splat(-126.0f), given) - (times - 12582912.0f);
#endif
    floats poly = splat(9.582853e-3f);
    poly = poly * rest + 5.590642e-2f;
    poly = poly * rest + 2.402410e-1f;
    poly = poly * rest + 6.931242e-1f;
    poly = poly * rest + 1.0f;
#if defined(__AVX512F__)
    return (floats)_mm512_scalef_ps((__m512)poly, whole);
#else
    return choose(given != given, given, (floats)(((ints)poly + (power << 23)) & ~below));
#endif
}

/* e^x - 1 to about 3 units in the last place; -1 below -87, e^88 above 88. */
INLINE floats expm1_of(floats given) {
    ints power;
    floats x = choose(given > splat(88.0f), splat(88.0f), choose(given < splat(-87.0f), splat(-87.0f), given));
    floats poly = expm1_of_rest(x, &power), scale = (floats)((power + 127) << 23);
    return choose(given != given, given, poly * scale + (scale - 1.0f));
}

/* tanh(x) to about 4 units in the last place. */
INLINE floats tanh_of(floats x) {
    floats grown = expm1_of(x + x);
    return grown / (grown + 2.0f);
}

/* Vectors of pairs of bfloat16, as many as floats. `add_products` adds the products of both elements to a float:
 * HAS_PAIRS where the processor has an instruction for it. */
#if defined(__AVX512BF16__)
#define HAS_PAIRS
typedef __m512bh pairs;

INLINE pairs load_pairs(const void *from) { return (__m512bh)_mm512_loadu_si512(from); }

INLINE void store_pairs(void *to, pairs value) { _mm512_storeu_si512(to, (__m512i)value); }

INLINE pairs splat_pair(const void *from) {
    int32_t both;
    memcpy(&both, from, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

/* Rounds two vectors; what is below a normal number becomes 0. */
INLINE pairs rounded_pairs(floats first, floats last) { return _mm512_cvtne2ps_pbh((__m512)last, (__m512)first); }

INLINE floats add_products(floats sums, pairs a, pairs b) { return (floats)_mm512_dpbf16_ps((__m512)sums, a, b); }

/* Puts elements of two vectors side by side: the first 4 of every 8 in one, the last 4 in the other. */
INLINE void zip(pairs *first, pairs *last, pairs a, pairs b) {
    *first = (__m512bh)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
    *last = (__m512bh)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}

#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIRS
typedef bfloat16x8_t pairs;

INLINE pairs load_pairs(const void *from) { return vld1q_bf16(from); }

INLINE void store_pairs(void *to, pairs value) { vst1q_bf16(to, value); }

INLINE pairs splat_pair(const void *from) {
    int32_t both;
    memcpy(&both, from, sizeof both);
    return vreinterpretq_bf16_s32(vdupq_n_s32(both));
}

INLINE pairs rounded_pairs(floats first, floats last) {
    return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first), (float32x4_t)last);
}

INLINE floats add_products(floats sums, pairs a, pairs b) { return (floats)vbfdotq_f32((float32x4_t)sums, a, b); }

INLINE void zip(pairs *first, pairs *last, pairs a, pairs b) {
    uint16x8_t x = vreinterpretq_u16_bf16(a), y = vreinterpretq_u16_bf16(b);
    *first = vreinterpretq_bf16_u16(vzip1q_u16(x, y));
    *last = vreinterpretq_bf16_u16(vzip2q_u16(x, y));
}

#else
typedef struct {
    floats even, odd;
} pairs;

INLINE pairs pairs_of(words both) { return (pairs){(floats)(both << 16), (floats)(both & 0xffff0000)}; }

INLINE pairs load_pairs(const void *from) {
    words both;
    memcpy(&both, from, sizeof both);
    return pairs_of(both);
}

INLINE void store_pairs(void *to, pairs value) {
    const words both = (words)value.even >> 16 | (words)value.odd; /* which bfloat16 holds exactly */
    memcpy(to, &both, sizeof both);
}

INLINE pairs splat_pair(const float *from) { return (pairs){splat(from[0]), splat(from[1])}; }

INLINE floats add_products(floats sums, pairs a, pairs b) { return sums + a.even * b.even + a.odd * b.odd; }

#endif

/* Loads pairs for several uses: GCC may load them again for each of them otherwise. */
INLINE pairs load_pairs_once(const void *from) {
    pairs loaded = load_pairs(from);
#if defined(__AVX512BF16__)
    __asm__("" : "+v"(loaded));
#elif defined(HAS_PAIRS)
    __asm__("" : "+w"(loaded));
#elif defined(__AVX2__)
    __asm__("" : "+x"(loaded.even), "+x"(loaded.odd));
#endif
    return loaded;
}

/* Rows whose pairs are splat are held as `element`s. Without an instruction for pairs that is float: widening each
 * pair where it is splat would take as long as its products. */
#if defined(HAS_PAIRS)
typedef uint16_t element;
#define ELEMENT BFLOAT16
#define WIDENED(count) 1

INLINE const element *widened(element *room, const uint16_t *from, int64_t count) {
    return (void)room, (void)count, from;
}
#else
typedef float element;
#define ELEMENT FLOAT32
#define WIDENED(count) (count)

INLINE const element *widened(element *room, const uint16_t *from, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store_float32(room + i, load_bfloat16(from + i));
    for (; i < count; i++)
        room[i] = load_one(from, i, BFLOAT16);
    return room;
}
#endif

#endif
