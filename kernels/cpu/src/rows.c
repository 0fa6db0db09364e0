/* RMSNorm. Rows are shared among threads; none depends on another. */

#define OWN_WIDTH

#include "norm.h"

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
