/* Gates and factors of rows. No row depends on another. */

#define OWN_WIDTH

#include "states.h"
#include "calls.h"
#include "vectors.h"

INLINE floats gate_of(const char *gates, int64_t i, int64_t width, int type) {
    floats x = load_up_to(gates, i, width - i, type);
    return x / (1.0f + exp_of(-x));
}

INLINE void gate_row(char *out, float *made, const struct recurrence *of, const char *gates, int type) {
    const int64_t width = of->heads * of->value_dim, part = of->norm ? of->norm_part : width;
    for (int64_t first = 0; first < width; first += part) {
        const char *of_part = gates + first * size_of(type);
        float *x = made + first, scale = 1.0f;
        if (of->norm) {
            floats squares = splat(0.0f);
            for (int64_t i = 0; i < part; i += LANES) {
                floats value = load_up_to(x, i, part - i, FLOAT32);
                if (of->gates_first)
                    store_up_to(x, i, part - i, value *= gate_of(of_part, i, part, type), FLOAT32);
                squares += value * value;
            }
            scale = 1.0f / sqrtf(sum_of(squares) / (float)part + (float)of->eps);
        }
        for (int64_t i = 0; i < part; i += LANES) {
            floats value = load_up_to(x, i, part - i, FLOAT32);
            if (of->norm) {
                const char *weight = (const char *)of->norm + first % of->norm_width * size_of(type);
                value *= scale;
                value = (of->rounds ? rounded_to(value, type) : value) * load_up_to(weight, i, part - i, type);
                value = of->rounds ? rounded_to(value, type) : value;
            }
            if (!of->norm || !of->gates_first)
                value *= gate_of(of_part, i, part, type);
            store_up_to(out + first * size_of(type), i, part - i, rounded_to(value, type) * (float)of->scale, type);
        }
    }
}

/* x: [rows, x_stride], whose gates multiply `residual`, float32 [rows, heads * value_dim], which is overwritten. out:
 * [rows, heads * value_dim], as x. A unit is a row. */
void pdserve_gating(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct recurrence *of = call->recurrence;
    const int64_t size = call->type == FLOAT32 ? 4 : 2;
    (void)rows;
    for (int64_t row = begin; row < end; row++) {
        char *out = (char *)call->out + row * call->out_stride * size;
        float *made = (float *)call->residual + row * call->residual_stride;
        const char *gates = (const char *)call->x + (row * call->x_stride + of->gates_at) * size;
        if (call->type == FLOAT32)
            gate_row(out, made, of, gates, FLOAT32);
        else
            gate_row(out, made, of, gates, BFLOAT16);
    }
}

INLINE void scale_rows(const struct call *call, int64_t begin, int64_t end, int type) {
    const int64_t size = size_of(type);
    for (int64_t row = begin; row < end; row++) {
        const char *x = (const char *)call->x + row * call->x_stride * size;
        const char *gates = (const char *)call->residual + row * call->residual_stride * size;
        char *out = (char *)call->out + row * call->out_stride * size;
        for (int64_t i = 0; i < call->width; i += LANES) {
            floats factor = splat((float)call->scale);
            if (call->weights)
                factor = load_up_to(call->weights, i, call->width - i, type);
            if (call->residual)
                factor = rounded_to(1.0f / (1.0f + exp_of(-load_up_to(gates, i, call->width - i, type))), type);
            store_up_to(out, i, call->width - i, load_up_to(x, i, call->width - i, type) * factor, type);
        }
    }
}

/* Multiplies rows [rows, width] with `scale`, with weights: [width], or with the sigmoid of residual: [rows, width]. out
 * may be x. A unit is a row. */
void pdserve_scaling(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    (void)rows;
    if (call->type == FLOAT32)
        scale_rows(call, begin, end, FLOAT32);
    else
        scale_rows(call, begin, end, BFLOAT16);
}

INLINE void multiply_rows(const struct call *call, int64_t begin, int64_t end, int type) {
    const int64_t size = size_of(type);
    for (int64_t row = begin; row < end; row++) {
        const char *x = (const char *)call->x + row * call->x_stride * size;
        const char *factors = (const char *)call->residual + row * call->residual_stride * size;
        char *out = (char *)call->out + row * call->out_stride * size;
        for (int64_t i = 0; i < call->width; i += LANES) {
            floats factor = load_up_to(factors, i, call->width - i, type);
            store_up_to(out, i, call->width - i, load_up_to(x, i, call->width - i, type) * factor, type);
        }
    }
}

/* Multiplies rows [rows, width] with those of residual, of as many. out may be x. A unit is a row. */
void pdserve_multiplying(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    (void)rows;
    if (call->type == FLOAT32)
        multiply_rows(call, begin, end, FLOAT32);
    else
        multiply_rows(call, begin, end, BFLOAT16);
}
