/* How rows choose experts: the rule of pdserve/model/routing.py. */

#include "chosen.h"
#include "vectors.h"

#define LOGITS_AT_ONCE 8 /* experts whose products with a row are summed together */
#define LOGITS_ROWS 16   /* of a unit */

INLINE int64_t parts_of(int64_t count, int64_t most) { return (count + most - 1) / most; }

int64_t pdserve_units_logits(const struct call *call, int64_t rows) {
    return parts_of(call->width, LOGITS_AT_ONCE) * parts_of(rows, LOGITS_ROWS);
}

/* Products of one row with `count` experts from the first on. */
INLINE void row_logits(const struct call *call, int64_t row, int64_t first, const int64_t count, int type) {
    const int64_t inputs = call->inputs, whole = inputs - inputs % LANES, size = size_of(type);
    const char *x = (const char *)call->x + row * call->x_stride * size;
    const char *weights = (const char *)call->weights + first * inputs * size;
    floats sums[LOGITS_AT_ONCE];
    for (int64_t i = 0; i < count; i++)
        sums[i] = splat(0.0f);
    for (int64_t at = 0; at < whole; at += LANES) {
        const floats inputs_here = load(x, at, type);
        for (int64_t i = 0; i < count; i++)
            sums[i] += inputs_here * load(weights, i * inputs + at, type);
    }
    float *out = (float *)call->out + row * call->out_stride + first;
    for (int64_t i = 0; i < count; i++) {
        if (whole < inputs)
            sums[i] += load_part(x, whole, inputs - whole, type)
                       * load_part(weights, i * inputs + whole, inputs - whole, type);
        out[i] = sum_of(sums[i]) + (call->bias ? ((const float *)call->bias)[first + i] : 0.0f);
    }
}

INLINE void some_logits(const struct call *call, int64_t row, int64_t first, int64_t count, int type) {
    if (count == LOGITS_AT_ONCE)
        row_logits(call, row, first, LOGITS_AT_ONCE, type);
    else
        for (int64_t i = 0; i < count; i++)
            row_logits(call, row, first + i, 1, type);
}

/* Multiplies rows with few outputs: x as the weights [width, inputs]; out, bias: float32. No unit depends on another. */
void pdserve_logits(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const int64_t blocks = parts_of(call->width, LOGITS_AT_ONCE);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t first = unit % blocks * LOGITS_AT_ONCE, left = call->width - first;
        const int64_t count = left < LOGITS_AT_ONCE ? left : LOGITS_AT_ONCE, row = unit / blocks * LOGITS_ROWS;
        for (int64_t i = row; i < rows && i < row + LOGITS_ROWS; i++) {
            if (call->type == FLOAT32)
                some_logits(call, i, first, count, FLOAT32);
            else
                some_logits(call, i, first, count, BFLOAT16);
        }
    }
}

/* Whether a rank comes before another one that is not its equal: as torch sorts, with NaN first. */
static int is_before(float a, float b) { return a > b || (a != a && b == b); }

/* Finds the first of ranks that are not taken yet; of equal ones that of the lowest index. */
static int64_t take_first(const float *ranks, uint8_t *taken, int64_t count) {
    int64_t best = 0;
    while (best < count - 1 && taken[best])
        best++;
    for (int64_t i = best + 1; i < count; i++)
        if (!taken[i] && is_before(ranks[i], ranks[best]))
            best = i;
    taken[best] = 1;
    return best;
}

static void score(float *scores, const float *logits, int64_t count, int by_sigmoid) {
    float most = logits[0], sum = 0.0f;
    if (by_sigmoid) {
        for (int64_t i = 0; i < count; i++)
            scores[i] = 1.0f / (1.0f + expf(-logits[i]));
        return;
    }
    for (int64_t i = 1; i < count; i++)
        most = is_before(logits[i], most) ? logits[i] : most;
    for (int64_t i = 0; i < count; i++)
        sum += scores[i] = expf(logits[i] - most);
    for (int64_t i = 0; i < count; i++)
        scores[i] /= sum;
}

/* The sum of a group's `count` best ranks. */
static float best_of_group(const float *ranks, int64_t size, int64_t count) {
    uint8_t taken[size];
    memset(taken, 0, size);
    const float best = ranks[take_first(ranks, taken, size)];
    return count == 1 || size == 1 ? best : best + ranks[take_first(ranks, taken, size)];
}

/* Leaves the experts of the best groups. */
static void leave_groups(float *ranks, const struct mixture *of) {
    const int64_t size = of->num_experts / of->num_groups;
    float best[of->num_groups];
    uint8_t taken[of->num_groups];
    memset(taken, 0, of->num_groups);
    for (int64_t group = 0; group < of->num_groups; group++)
        best[group] = best_of_group(ranks + group * size, size, of->group_best);
    for (int64_t i = 0; i < of->num_kept_groups; i++)
        take_first(best, taken, of->num_groups);
    for (int64_t i = 0; i < of->num_experts; i++)
        ranks[i] = taken[i / size] ? ranks[i] : -INFINITY;
}

/* Puts a row's choice in the order of the experts. */
static void put_in_order(int32_t *experts, float *shares, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        const int32_t expert = experts[i];
        const float share = shares[i];
        int64_t at = i;
        for (; at > 0 && experts[at - 1] > expert; at--)
            experts[at] = experts[at - 1], shares[at] = shares[at - 1];
        experts[at] = expert, shares[at] = share;
    }
}

static void route_row(const struct call *call, const struct chosen *chosen, int64_t row) {
    const struct mixture *of = &call->mixture;
    const int64_t count = of->num_experts, num_chosen = of->num_chosen;
    const float *bias = call->bias, *factors = call->weights;
    int32_t *experts = chosen->experts + row * num_chosen;
    float *shares = chosen->shares + row * num_chosen, scores[count], ranks[count], sum = 0.0f;
    uint8_t taken[count];
    score(scores, (const float *)call->x + row * call->x_stride, count, of->by_sigmoid);
    for (int64_t i = 0; i < count; i++)
        ranks[i] = bias ? scores[i] + bias[i] : scores[i];
    if (of->num_kept_groups < of->num_groups)
        leave_groups(ranks, of);
    memset(taken, 0, count);
    for (int64_t i = 0; i < num_chosen; i++) {
        experts[i] = (int32_t)take_first(ranks, taken, count);
        sum += shares[i] = scores[experts[i]];
    }
    sum += (float)of->added;
    const float divisor = !of->normalized ? 1.0f : sum < 1e-20f ? 1e-20f : sum;
    for (int64_t i = 0; i < num_chosen; i++)
        shares[i] = shares[i] / divisor * (float)call->scale * (factors ? factors[experts[i]] : 1.0f);
    put_in_order(experts, shares, num_chosen);
}

/* x: logits, float32 [rows, num_experts]; bias, weights (factors of experts' shares): float32 [num_experts], or NULL;
 * scale: of shares. A unit is a row. */
void pdserve_routing(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const struct chosen chosen = chosen_of(call, rows);
    for (int64_t row = begin; row < end; row++)
        route_row(call, &chosen, row);
}
