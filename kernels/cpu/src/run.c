/* Runs calls at once, one after the other, in OpenMP's team, which torch's own operations have just used. */

#include <omp.h>

#include "calls.h"

#define WORTH_THREADS 65536 /* elements of rows; fewer take less time than waking threads */

int64_t pdserve_units_of(const struct call *call, int64_t rows) {
    switch (call->kind) {
    case PRODUCT_BFLOAT16: return pdserve_units_bfloat16(call, rows);
    case PRODUCT_QUANTIZED: return pdserve_units_quantized(call, rows);
    case PLACING: return pdserve_units_placing(call, rows);
    case RANGES: return pdserve_units_ranges(call, rows);
    case COMBINING: return pdserve_units_combining(call, rows);
    case BLOCKS: return pdserve_units_blocks(call, rows);
    case LOGITS: return pdserve_units_logits(call, rows);
    case GROUPING: return pdserve_units_grouping(call, rows);
    case GATHERING:
    case EXPERTS_CODING: return pdserve_units_slots(call, rows);
    case EXPERTS: return pdserve_units_experts(call, rows);
    case SUMMING: return pdserve_units_summing(call, rows);
    case RANKS_SUM:
    case RANKS_GATHER:
    case RANKS_PASS: return 1;
    case PRODUCT_HEADS: return pdserve_units_heads(call, rows);
    case RECURRING: return pdserve_units_recurring(call, rows);
    case KEEPING: return pdserve_units_keeping(call, rows);
    default: return rows;
    }
}

void pdserve_work(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    static work *const works[] = {
        [NORM] = pdserve_norm, [LOOKUP_BFLOAT16] = pdserve_lookup_bfloat16,
        [LOOKUP_QUANTIZED] = pdserve_lookup_quantized, [PRODUCT_BFLOAT16] = pdserve_product_bfloat16,
        [CODING] = pdserve_coding, [PRODUCT_QUANTIZED] = pdserve_product_quantized, [PLACING] = pdserve_placing,
        [RANGES] = pdserve_ranges, [COMBINING] = pdserve_combining, [BLOCKS] = pdserve_blocks,
        [LAYER_NORM] = pdserve_layer_norm, [LOGITS] = pdserve_logits, [ROUTING] = pdserve_routing,
        [GROUPING] = pdserve_grouping, [GATHERING] = pdserve_gathering, [EXPERTS] = pdserve_experts,
        [EXPERTS_CODING] = pdserve_experts_coding, [SUMMING] = pdserve_summing,
        [RANKS_SUM] = pdserve_ranks_sum, [RANKS_GATHER] = pdserve_ranks_gather,
        [PRODUCT_HEADS] = pdserve_product_heads, [RANKS_PASS] = pdserve_ranks_pass,
        [CONVOLVING] = pdserve_convolving, [RECURRING] = pdserve_recurring, [KEEPING] = pdserve_keeping,
        [GATING] = pdserve_gating, [SCALING] = pdserve_scaling,
        [MULTIPLYING] = pdserve_multiplying,
    };
    works[call->kind](call, rows, begin, end);
}

static int is_worth_threads(const struct call *call, int64_t rows) {
    switch (call->kind) {
    case NORM:
    case LAYER_NORM:
    case CONVOLVING:
    case GATING:
    case SCALING:
    case MULTIPLYING: return rows * call->width >= WORTH_THREADS;
    case LOOKUP_BFLOAT16:
    case LOOKUP_QUANTIZED: return rows * call->inputs >= WORTH_THREADS;
    case PLACING: return pdserve_attention_is_long(call);
    case RANKS_SUM:
    case RANKS_GATHER:
    case RANKS_PASS: return 0;
    default: return 1;
    }
}

/* The first call decides whether threads are worth waking: all calls belong to one operation. */
void pdserve_run(const struct call *calls, int64_t count, int64_t rows) {
#pragma omp parallel if (is_worth_threads(calls, rows))
    for (int64_t i = 0; i < count; i++) {
        const int64_t total = pdserve_units_of(&calls[i], rows), run = pdserve_run_length(total, omp_get_num_threads());
#pragma omp for schedule(dynamic)
        for (int64_t begin = 0; begin < total; begin += run)
            pdserve_work(&calls[i], rows, begin, begin + run < total ? begin + run : total);
    }
}
