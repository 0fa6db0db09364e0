/* RMSNorm of one row (Zhang, Sennrich 2019). */

#ifndef PDSERVE_NORM_H
#define PDSERVE_NORM_H

#include "vectors.h"

/* out may be row. What is scaled is rounded to the row's type before it is weighted, as models are trained. */
INLINE void norm_row(char *out, const char *row, const char *weight, int64_t width, float eps, int type) {
    floats squares = {0};
    int64_t whole = width - width % LANES, rest = width - whole;
    for (int64_t i = 0; i < whole; i += LANES) {
        floats x = load(row, i, type);
        squares += x * x;
    }
    if (rest) {
        floats x = load_part(row, whole, rest, type);
        squares += x * x;
    }
    float scale = 1.0f / sqrtf(sum_of(squares) / (float)width + eps);
    for (int64_t i = 0; i < whole; i += LANES)
        store(out, i, rounded_to(load(row, i, type) * scale, type) * load(weight, i, type), type);
    if (rest) {
        floats x = rounded_to(load_part(row, whole, rest, type) * scale, type);
        store_part(out, whole, rest, x * load_part(weight, whole, rest, type), type);
    }
}

#endif
