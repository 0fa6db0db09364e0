/* Activations of MLPs. Their errors in float32 are bounded by tests/cpu_kernels/test_cpu_activations.py. */

#ifndef PDSERVE_ACTIVATIONS_H
#define PDSERVE_ACTIVATIONS_H

#include "calls.h"
#include "vectors.h"

/* As kernels/cpu/layers.py numbers them. */
enum { NO_ACTIVATION, SILU, GELU, GELU_TANH, SQUARED_RELU, XIELU, SWIGLU_OAI };

/* erf(x) by a rational function; from 4 on it is 1 in float32. The coefficients are Eigen's. */
INLINE floats erf_of(floats x) {
    x = choose(x > splat(4.0f), splat(4.0f), choose(x < splat(-4.0f), splat(-4.0f), x));
    floats square = x * x;
    floats above = splat(-2.72614225801306e-10f);
    above = above * square + 2.77068142495902e-08f;
    above = above * square - 2.10102402082508e-06f;
    above = above * square - 5.69250639462346e-05f;
    above = above * square - 7.34990630326855e-04f;
    above = above * square - 2.95459980854025e-03f;
    above = above * square - 1.60960333262415e-02f;
    floats below = splat(-1.45660718464996e-05f);
    below = below * square - 2.13374055278905e-04f;
    below = below * square - 1.68282697438203e-03f;
    below = below * square - 7.37332916720468e-03f;
    below = below * square - 1.42647390514189e-02f;
    return x * above / below;
}

/* x / (1 + e^-x) */
INLINE floats silu_of(floats x) { return x / (1.0f + exp_of(-x)); }

/* With tanh, GELU is x / (1 + e^-2u) where u = sqrt(2 / pi) * (x + 0.044715 * x^3). */
INLINE floats gelu_tanh_of(floats x) {
    return x / (1.0f + exp_of(x * (x * x * -0.0713548162726f - 1.59576912161f)));
}

/* xIELU (Huang, Schlag 2024), with the constants of pdserve/model/activations.py. */
INLINE floats xielu_of(floats x, float positive, float negative) {
    floats most = choose(x > splat(-1e-6f), splat(-1e-6f), x);
    return choose(x > splat(0.0f), positive * x * x, (expm1_of(most) - x) * negative) + 0.5f * x;
}

INLINE floats activated(const struct call *call, floats x) {
    switch (call->activation) {
    case SILU: return silu_of(x);
    case GELU: return 0.5f * x * (1.0f + erf_of(x * 0.707106781f));
    case GELU_TANH: return gelu_tanh_of(x);
    case SQUARED_RELU: return larger(splat(0.0f), x) * larger(splat(0.0f), x);
    case XIELU: return xielu_of(x, (float)call->positive, (float)call->negative);
    default: return x;
    }
}

/* GPT-OSS's, with the constants of pdserve/model/activations.py. What is not a number stays so. */
INLINE floats swiglu_oai_of(floats gates, floats ups) {
    gates = choose(gates > splat(7.0f), splat(7.0f), gates);
    ups = choose(ups > splat(7.0f), splat(7.0f), choose(ups < splat(-7.0f), splat(-7.0f), ups));
    return (ups + 1.0f) * (gates / (1.0f + exp_of(gates * -1.702f)));
}

INLINE floats gated_of(const struct call *call, floats gates, floats ups) {
    return call->activation == SWIGLU_OAI ? swiglu_oai_of(gates, ups) : activated(call, gates) * ups;
}

#endif
