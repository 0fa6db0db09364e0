/* Weights in FP8: a sign, four bits of an exponent and three of a mantissa (e4m3; Micikevicius et al. 2022).
 *
 * bfloat16 holds all of them exactly, with a bias of the exponent of 127 in place of 7. NaN is no weight here.
 */

#ifndef PDSERVE_FP8_H
#define PDSERVE_FP8_H

#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

/* The bits as bfloat16 of a magnitude: those below 8 have no leading one. */
#define MAGNITUDE(m) (!(m) ? 0 : (m) < 2 ? 0x3b00 : (m) < 4 ? 0x3b00 + 64 * (m) : (m) < 8 ? 0x3b80 + 32 * (m) : 0x3c00 + 16 * (m))
#define LOW(m) (uint8_t)MAGNITUDE(m)
#define HIGH(m) (MAGNITUDE(m) >> 8)
#define FOUR(of, m) of(m), of(m + 1), of(m + 2), of(m + 3)
#define SIXTEEN(of, m) FOUR(of, m), FOUR(of, m + 4), FOUR(of, m + 8), FOUR(of, m + 12)
#define SIXTY_FOUR(of, m) SIXTEEN(of, m), SIXTEEN(of, m + 16), SIXTEEN(of, m + 32), SIXTEEN(of, m + 48)

static const uint8_t LOW_BYTES[2][64] = {{SIXTY_FOUR(LOW, 0)}, {SIXTY_FOUR(LOW, 64)}};
static const uint8_t HIGH_BYTES[2][64] = {{SIXTY_FOUR(HIGH, 0)}, {SIXTY_FOUR(HIGH, 64)}};

#define BOTH(m) m, (m) + 64 /* the same byte of two vectors */
static const uint8_t SIDE_BY_SIDE[2][64] = {
    {SIXTEEN(BOTH, 0), SIXTEEN(BOTH, 16)}, {SIXTEEN(BOTH, 32), SIXTEEN(BOTH, 48)}
};

INLINE __m512i looked_up(const uint8_t table[2][64], __m512i at) {
    return _mm512_permutex2var_epi8(_mm512_loadu_si512(table[0]), at, _mm512_loadu_si512(table[1]));
}

/* Loads 16 pairs into each of `parts` vectors. */
INLINE void load_fp8_pairs(pairs *out, const char *from, int parts) {
    const __m512i all = parts == 2 ? _mm512_loadu_si512(from) : _mm512_castsi256_si512(_mm256_loadu_si256((const void *)from));
    const __m512i low = looked_up(LOW_BYTES, all), magnitudes = looked_up(HIGH_BYTES, all);
    const __m512i high = _mm512_ternarylogic_epi32(magnitudes, all, _mm512_set1_epi8(-128), 0xf8); /* m | (all & sign) */
    for (int part = 0; part < parts; part++)
        out[part] = (pairs)_mm512_permutex2var_epi8(low, _mm512_loadu_si512(SIDE_BY_SIDE[part]), high);
}

#else

typedef int16_t signed_halfwords __attribute__((vector_size(BYTES / 2)));

/* The values of codes, which are the high bytes, by way of float16, whose exponent has a bias of 15. */
INLINE floats fp8_values(halfwords codes) {
    const halfwords halves = (halfwords)((signed_halfwords)codes >> 1) & 0xbf80;
    return load_float16(&halves) * 0x1p8f;
}

/* Loads LANES pairs into each of `parts` vectors. */
INLINE void load_fp8_pairs(pairs *out, const char *from, int parts) {
#pragma GCC unroll 8
    for (int part = 0; part < parts; part++) {
        halfwords both;
        memcpy(&both, from + part * sizeof both, sizeof both);
        const floats even = fp8_values(both << 8), odd = fp8_values(both);
#if defined(HAS_PAIRS)
        const words joined = (words)even >> 16 | (words)odd; /* bfloat16 holds them exactly */
        out[part] = load_pairs(&joined);
#else
        out[part] = (pairs){even, odd};
#endif
    }
}

#endif

/* Writes all pairs of a tile in bfloat16. */
INLINE void widen_fp8(char *to, const char *from) {
    pairs wide[32 / LANES];
    load_fp8_pairs(wide, from, 32 / LANES);
#pragma GCC unroll 8
    for (int part = 0; part < 32 / LANES; part++)
        store_pairs(to + part * 4 * LANES, wide[part]);
}

#endif
