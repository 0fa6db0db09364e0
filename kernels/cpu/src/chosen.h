/* What the rows of a step have chosen of a mixture of experts.
 *
 * A slot is a pair of a row and an expert that it has chosen. Slots are in the order of their experts, and those of one
 * expert in the order of their rows. So each expert computes a run of slots. */

#ifndef PDSERVE_CHOSEN_H
#define PDSERVE_CHOSEN_H

#include "calls.h"

struct chosen {
    /* Of experts, with what comes after the last one: */
    int32_t *firsts; /* [num_experts + 1]: its first slot */
    int32_t *costs;  /* [num_experts + 1]: what a tile of all experts before it costs: see pdserve_grouping */
    /* Of rows, in the order of the experts that they have chosen: */
    int32_t *experts; /* [rows, num_chosen] */
    int32_t *places;  /* [rows, num_chosen]: slots */
    float *shares;    /* [rows, num_chosen] */
    /* Of slots: */
    int32_t *rows;         /* [rows * num_chosen] */
    int32_t *slot_experts; /* [rows * num_chosen] */
};

/* kernels/cpu/experts.py allocates 4 * (2 * (num_experts + 1) + 5 * rows * num_chosen) bytes. */
static inline struct chosen chosen_of(const struct call *call, int64_t rows) {
    const int64_t ends = call->mixture.num_experts + 1, slots = rows * call->mixture.num_chosen;
    int32_t *at = call->mixture.chosen, *of_rows = at + 2 * ends;
    return (struct chosen){
        .firsts = at, .costs = at + ends, .experts = of_rows, .places = of_rows + slots,
        .shares = (float *)(of_rows + 2 * slots), .rows = of_rows + 3 * slots, .slot_experts = of_rows + 4 * slots,
    };
}

#endif
