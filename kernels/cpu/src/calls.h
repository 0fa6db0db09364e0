/* A call is one operation of a layer over a step's rows, or a part of an operation that follows another part. A program
 * is a run of calls.
 *
 * A call's work is a number of units that do not depend on each other: rows, tiles of outputs, ranges of keys. */

#ifndef PDSERVE_CALLS_H
#define PDSERVE_CALLS_H

#include <stdatomic.h>
#include <stdint.h>

/* As kernels/cpu/calls.py numbers them. */
enum {
    NORM, LOOKUP_BFLOAT16, LOOKUP_QUANTIZED, PRODUCT_BFLOAT16, CODING, PRODUCT_QUANTIZED, PLACING, RANGES, COMBINING,
    BLOCKS, LAYER_NORM, LOGITS, ROUTING, GROUPING, GATHERING, EXPERTS, EXPERTS_CODING, SUMMING, RANKS_SUM, RANKS_GATHER,
    PRODUCT_HEADS, RANKS_PASS, CONVOLVING, RECURRING, KEEPING, GATING, SCALING, MULTIPLYING
};

struct step;
struct ranks;
struct states;
struct recurrence;

/* What calls of a mixture of experts share. The rule by which rows choose is kernels/routing.py's `Routing`. */
struct mixture {
    void *chosen; /* see chosen.h */
    int64_t num_experts, num_chosen, by_sigmoid, normalized, num_groups, num_kept_groups;
    int64_t group_best;        /* whose sum is a group's rank: 1 or 2 */
    int64_t expert_bytes;      /* of an expert's weights; its biases follow one another, too */
    const void *shared;        /* [rows, width]: what the shared expert has made, or NULL */
    const float *shared_gates; /* [rows]: its sigmoid multiplies that, or NULL */
    int64_t *counts;           /* [num_experts]: rows that have chosen each since the start, or NULL */
    double added;              /* to the sum that a row's shares are divided by */
};

/* kernels/cpu/calls.py has the same fields. Strides are in elements. */
struct call {
    int64_t kind, type; /* type: of elements of x, and of out but where it is a product */
    int64_t out_type;   /* of a product's out, bias and residual */
    void *out, *x;      /* [rows, width]; [rows, inputs], or of a lookup int64 [rows] */
    int64_t out_stride, x_stride, inputs, width;
    const void *weights;
    const void *bias;     /* of each output, in the order of the weights, or NULL */
    const void *residual; /* [rows, width], or NULL; may be out */
    int64_t residual_stride, after, activation;
    int64_t num_heads, x_head; /* of a product of heads, whose width is a head's: from one head's inputs to the next's */
    int64_t bits, is_float, input_bits; /* of weights' codes, and whether they are floats; of inputs': 8 or 16 */
    void *scratch;           /* for inputs in codes: rows * (inputs * input_bits / 8 + inputs / 4) bytes */
    const struct step *step; /* of attention, whose x is qkv */
    int64_t layer, rope;         /* rope: of the step's */
    int64_t new_heads; /* KV heads whose K and V are in x; 0: the layer reads what another one has put into pages */
    const void *q_norm, *k_norm, *v_norm; /* [head_dim], or NULL */
    const float *sinks;                   /* [num_heads], or NULL: scores that join each softmax, without values */
    int64_t norms_after;                  /* whether those of q and k come after the rotation */
    double eps;
    double scale;              /* of a product's results, before the residual is added; of rows that are looked up */
    double cap;                /* c of c * tanh(result / c), after the scale; 0: none */
    double positive, negative; /* xIELU's scalars */
    struct mixture mixture;
    int64_t first;       /* of a lookup: the id of the first row that there is; the rows of ids without one are zeros */
    struct ranks *ranks; /* see ranks.c */
    const struct states *states; /* of a layer with a state; see states.h */
    const struct recurrence *recurrence;
    _Atomic uint64_t taken, done; /* in a program: see team.c */
};

/* How many units there are. */
typedef int64_t units(const struct call *call, int64_t rows);
units pdserve_units_bfloat16, pdserve_units_quantized, pdserve_units_placing, pdserve_units_ranges,
    pdserve_units_combining, pdserve_units_blocks, pdserve_units_logits, pdserve_units_grouping, pdserve_units_slots,
    pdserve_units_experts, pdserve_units_summing, pdserve_units_heads, pdserve_units_recurring, pdserve_units_keeping;

/* Each does the units from begin to before end. */
typedef void work(const struct call *call, int64_t rows, int64_t begin, int64_t end);
work pdserve_norm, pdserve_layer_norm, pdserve_lookup_bfloat16, pdserve_lookup_quantized, pdserve_product_bfloat16,
    pdserve_coding, pdserve_product_quantized, pdserve_placing, pdserve_ranges, pdserve_combining, pdserve_blocks,
    pdserve_logits, pdserve_routing, pdserve_grouping, pdserve_gathering, pdserve_experts, pdserve_experts_coding,
    pdserve_summing, pdserve_ranks_sum, pdserve_ranks_gather, pdserve_product_heads, pdserve_ranks_pass,
    pdserve_convolving, pdserve_recurring, pdserve_keeping, pdserve_gating, pdserve_scaling,
    pdserve_multiplying;

/* The same for a call of any kind; see run.c. */
units pdserve_units_of;
work pdserve_work;

/* Between two looks at what another thread or process is to write. */
static inline void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whether an attention takes longer than waking threads. */
int pdserve_attention_is_long(const struct call *call);

#define MOST_PIECES 255 /* of a call: team.c counts them in 8 bits */

/* Units of a piece, which are taken at once: few enough for threads to end together, many enough to be worth taking. No
 * unit's result depends on their number. */
static inline int64_t pdserve_run_length(int64_t units, int64_t num_threads) {
    const int64_t wanted = num_threads > 4 ? 4 * num_threads : 16, least = 1 + (units - 1) / MOST_PIECES;
    return units / wanted > least ? units / wanted : least;
}

#endif
