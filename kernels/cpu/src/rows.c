/* RMSNorm and LayerNorm. No row depends on another. */

#include "calls.h"
#include "norm.h"

INLINE void norm_rows(const struct call *call, int64_t begin, int64_t end, int type) {
    const char *x = call->x, *residual = call->residual;
    const int64_t size = size_of(type);
    char *out = call->out;
    for (int64_t row = begin; row < end; row++)
        norm_row_onto(out + row * call->out_stride * size, x + row * call->x_stride * size, call->weights,
                      residual ? residual + row * call->residual_stride * size : NULL, call->width, (float)call->eps,
                      type);
}

INLINE void layer_norm_rows(const struct call *call, int64_t begin, int64_t end, int type) {
    const char *x = call->x;
    const int64_t size = size_of(type);
    char *out = call->out;
    for (int64_t row = begin; row < end; row++)
        layer_norm_row(out + row * call->out_stride * size, x + row * call->x_stride * size, call->weights, call->bias,
                       call->width, (float)call->eps, type);
}

/* weights: [width]. A unit is a row. */
void pdserve_norm(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    (void)rows;
    if (call->type == FLOAT32)
        norm_rows(call, begin, end, FLOAT32);
    else
        norm_rows(call, begin, end, BFLOAT16);
}

/* weights, bias: [width]. A unit is a row. */
void pdserve_layer_norm(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    (void)rows;
    if (call->type == FLOAT32)
        layer_norm_rows(call, begin, end, FLOAT32);
    else
        layer_norm_rows(call, begin, end, BFLOAT16);
}
