/* RMSNorm. No row depends on another. */

#define OWN_WIDTH

#include "calls.h"
#include "norm.h"

/* weights: [width]. A unit is a row. */
void pdserve_norm(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const char *from = call->x, *weight = call->weights;
    const int64_t x_stride = call->x_stride, out_stride = call->out_stride, width = call->width;
    const float eps = (float)call->eps;
    char *to = call->out;
    (void)rows;
    for (int64_t row = begin; row < end; row++) {
        if (call->type == FLOAT32)
            norm_row(to + row * out_stride * 4, from + row * x_stride * 4, weight, width, eps, FLOAT32);
        else
            norm_row(to + row * out_stride * 2, from + row * x_stride * 2, weight, width, eps, BFLOAT16);
    }
}
