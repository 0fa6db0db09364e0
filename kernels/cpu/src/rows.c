/* Row-wise operations of a layer: RMSNorm and the gate of SwiGLU. Rows are shared among threads; none depends on another. */

#define OWN_WIDTH

#include "norm.h"
#include "vectors.h"

#define WORTH_THREADS 65536 /* elements; fewer take less time than waking threads */

/* out, x: [rows, width], strides in elements; weight: [width]. */
void pdserve_rms_norm(
    void *out, int64_t out_stride, const void *x, int64_t x_stride, const void *weight, int64_t rows, int64_t width,
    float eps, int64_t type
) {
    const char *from = x;
    char *to = out;
#pragma omp parallel for if (rows * width >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        if (type == FLOAT32)
            norm_row(to + row * out_stride * 4, from + row * x_stride * 4, weight, width, eps, FLOAT32);
        else
            norm_row(to + row * out_stride * 2, from + row * x_stride * 2, weight, width, eps, BFLOAT16);
    }
}

INLINE floats gated(floats gate, floats up, int type) {
    return rounded_to(gate / (1.0f + exp_of(-gate)), type) * up;
}

INLINE void gate_row(char *out, const char *row, int64_t width, int type) {
    const char *up = row + width * size_of(type);
    int64_t whole = width - width % LANES, rest = width - whole;
    for (int64_t i = 0; i < whole; i += LANES)
        store(out, i, gated(load(row, i, type), load(up, i, type), type), type);
    if (rest) {
        floats gate = load_part(row, whole, rest, type);
        store_part(out, whole, rest, gated(gate, load_part(up, whole, rest, type), type), type);
    }
}

/* out: [rows, width]; x: [rows, 2 * width], gates first. Strides in elements. */
void pdserve_silu_mul(
    void *out, int64_t out_stride, const void *x, int64_t x_stride, int64_t rows, int64_t width, int64_t type
) {
    const char *from = x;
    char *to = out;
#pragma omp parallel for if (rows * width >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        if (type == FLOAT32)
            gate_row(to + row * out_stride * 4, from + row * x_stride * 4, width, FLOAT32);
        else
            gate_row(to + row * out_stride * 2, from + row * x_stride * 2, width, BFLOAT16);
    }
}
