/* RMSNorm (Zhang, Sennrich 2019) and LayerNorm (Ba, Kiros, Hinton 2016) of one row. */

#ifndef PDSERVE_NORM_H
#define PDSERVE_NORM_H

#include "vectors.h"

/* out may be row. What is scaled is rounded to the row's type before it is weighted, as models are trained; and that
 * again before it is added to the residual, if there is one. */
INLINE void norm_row_onto(
    char *out, const char *row, const char *weight, const char *residual, int64_t width, float eps, int type
) {
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
    for (int64_t i = 0; i < whole; i += LANES) {
        floats x = rounded_to(load(row, i, type) * scale, type) * load(weight, i, type);
        store(out, i, residual ? rounded_to(x, type) + load(residual, i, type) : x, type);
    }
    if (rest) {
        floats x = rounded_to(load_part(row, whole, rest, type) * scale, type) * load_part(weight, whole, rest, type);
        if (residual)
            x = rounded_to(x, type) + load_part(residual, whole, rest, type);
        store_part(out, whole, rest, x, type);
    }
}

INLINE void norm_row(char *out, const char *row, const char *weight, int64_t width, float eps, int type) {
    norm_row_onto(out, row, weight, NULL, width, eps, type);
}

/* out may be row. Only the result is rounded. */
INLINE void layer_norm_row(
    char *out, const char *row, const char *weight, const char *bias, int64_t width, float eps, int type
) {
    int64_t whole = width - width % LANES, rest = width - whole;
    floats sums = {0}, squares = {0};
    for (int64_t i = 0; i < whole; i += LANES)
        sums += load(row, i, type);
    float sum = sum_of(rest ? sums + load_part(row, whole, rest, type) : sums), mean = sum / (float)width, tail = 0.0f;
    for (int64_t i = 0; i < whole; i += LANES) {
        floats x = load(row, i, type) - mean;
        squares += x * x;
    }
    for (int64_t i = whole; i < width; i++) {
        float x = load_one(row, i, type) - mean;
        tail += x * x;
    }
    float scale = 1.0f / sqrtf((sum_of(squares) + tail) / (float)width + eps);
    for (int64_t i = 0; i < whole; i += LANES)
        store(out, i, (load(row, i, type) - mean) * scale * load(weight, i, type) + load(bias, i, type), type);
    if (rest) {
        floats x = (load_part(row, whole, rest, type) - mean) * scale;
        x = x * load_part(weight, whole, rest, type) + load_part(bias, whole, rest, type);
        store_part(out, whole, rest, x, type);
    }
}

#endif
