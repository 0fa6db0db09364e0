/* Sampling: the largest sum of score and noise among the tokens that top-k, top-p and min-p keep.
 *
 * tests/support/reference_kernels.py defines a row's token, kernels/rng.py its noise. What the filters keep is always
 * what scores a floor or more. The floor is found without sorting a vocabulary: scores within REACH of the largest are
 * counted and weighed in buckets, and the bucket that holds the floor is sorted. Where those scores do not hold the
 * floor, all scores are looked at in the same way. */

#include <omp.h>
#include <stdlib.h>

#include "vectors.h"

#define REACH 10.0f /* below the largest score: less likely by e^-10 */
#define BUCKETS 1024
#define GREEDY 0.0f /* in place of a temperature */
#define WORTH_THREADS 1000000 /* logits; 8 rows of 49,152 gain little, 32 take 0.6 of the time in two threads */

/* kernels/cpu/sample.py has the same fields. */
struct row {
    const void *logits; /* [vocab] */
    int64_t type, top_k; /* top_k: 0 keeps all */
    double top_p, log_min_p; /* 1 and -inf keep all */
    uint32_t low, high; /* the row's key */
    float temperature;
};

/* What a thread reuses from row to row. */
struct scratch {
    float *scores; /* [vocab + LANES] */
    float *near;   /* [vocab] */
    float peak;    /* the largest score */
    float reach;   /* below the peak: what is spread over the buckets */
    double masses[BUCKETS];
    int64_t counts[BUCKETS];
};

INLINE words scrambled(words x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* The natural logarithm of positive normal numbers, to about 1 unit in the last place (Moshier, Cephes). */
INLINE floats log_of(floats x) {
    ints power = (ints)((words)x >> 23) - 126;
    floats rest = (floats)(((ints)x & 0x007fffff) | 0x3f000000);
    ints small = rest < 0.707106781186547524f;
    power += small; /* a true comparison is -1 */
    rest = choose(small, rest + rest, rest) - 1.0f;
    floats exponent = __builtin_convertvector(power, floats), square = rest * rest;
    floats poly = splat(7.0376836292e-2f);
    poly = poly * rest - 1.1514610310e-1f;
    poly = poly * rest + 1.1676998740e-1f;
    poly = poly * rest - 1.2420140846e-1f;
    poly = poly * rest + 1.4249322787e-1f;
    poly = poly * rest - 1.6668057665e-1f;
    poly = poly * rest + 2.0000714765e-1f;
    poly = poly * rest - 2.4999993993e-1f;
    poly = poly * rest + 3.3333331174e-1f;
    poly = poly * rest * square + exponent * -2.12194440e-4f - 0.5f * square;
    return rest + poly + exponent * 0.693359375f;
}

/* 32 uniform bits for each of a vector's token ids, as rng.random_bits makes them. */
INLINE words bits_of(words ids, uint32_t low, uint32_t high) { return scrambled(scrambled(ids ^ low) + high); }

/* One standard Gumbel variate for each, as rng.gumbel makes them. */
INLINE floats noise_of(words bits) {
    floats u = (__builtin_convertvector(bits, floats) + 0.5f) * 0x1p-32f;
    u = choose(u > 1.0f - 0x1p-24f, splat(1.0f - 0x1p-24f), u);
    floats series = ((u * (1.0f / 3.0f) + 0.5f) * u + 1.0f) * u;
    return -log_of(choose(u < 0x1p-10f, series, -log_of(1.0f - u)));
}

INLINE int any(ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int32_t lanes[LANES], found = 0;
    memcpy(lanes, &mask, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++)
        found |= lanes[lane];
    return found;
#endif
}

/* The smallest of the ids that stand beside the largest value. */
INLINE int64_t first_of_largest(floats values, words ids) {
    float most = max_of(values);
    uint32_t first = UINT32_MAX;
    for (int lane = 0; lane < LANES; lane++)
        if (values[lane] == most && ids[lane] < first)
            first = ids[lane];
    return first;
}

/* The id of the largest logit, the first of equal ones; where one is not a number, the first such. */
INLINE int64_t largest_logit(const struct row *row, int64_t vocab, int type) {
    floats most[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    ints is_nan = {0};
    int64_t i = 0;
    for (; i + 4 * LANES <= vocab; i += 4 * LANES)
        for (int v = 0; v < 4; v++) {
            floats x = load(row->logits, i + v * LANES, type);
            most[v] = larger(x, most[v]);
            is_nan |= x != x;
        }
    int64_t whole = i;
    for (; i < vocab; i++) {
        float x = load_one(row->logits, i, type);
        most[0][0] = x > most[0][0] ? x : most[0][0];
        is_nan[0] |= x != x;
    }
    int broken = any(is_nan);
    float peak = max_of(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    for (i = 0; i < whole && !broken; i += 4 * LANES) { /* skips what does not hold it */
        ints found = {0};
        for (int v = 0; v < 4; v++)
            found |= load(row->logits, i + v * LANES, type) == peak;
        if (any(found))
            break;
    }
    for (; i < vocab; i++) {
        float x = load_one(row->logits, i, type);
        if (broken ? x != x : x == peak)
            return i;
    }
    return 0;
}

/* Writes the scores, padded with -inf to whole vectors, and finds the largest; returns whether all can be used. */
INLINE int read_scores(struct scratch *scratch, const struct row *row, int64_t vocab, int type) {
    floats most = splat(-INFINITY);
    ints is_nan = {0};
    int64_t whole = vocab - vocab % LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        floats x = load(row->logits, i, type) / row->temperature;
        store_float32(scratch->scores + i, x);
        most = larger(x, most);
        is_nan |= x != x;
    }
    if (whole < vocab) {
        store_float32(scratch->scores + whole, splat(-INFINITY));
        floats x = load_part(row->logits, whole, vocab - whole, type) / row->temperature;
        store_part(scratch->scores, whole, vocab - whole, x, FLOAT32);
        is_nan |= x != x;
        most = larger(load_float32(scratch->scores + whole), most);
    }
    scratch->peak = max_of(most);
    return !any(is_nan) && isfinite(scratch->peak);
}

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

INLINE int64_t bucket_of(const struct scratch *scratch, float score) {
    float place = (scratch->peak - score) * (BUCKETS / scratch->reach);
    return place < BUCKETS - 1 ? (int64_t)place : BUCKETS - 1;
}

/* Gathers the scores of at least `least`, in their order; returns how many. */
static int64_t gather(struct scratch *scratch, int64_t vocab, float least) {
    int64_t found = 0;
    for (int64_t i = 0; i < vocab; i += LANES) {
        floats x = load_float32(scratch->scores + i);
        if (!any(x >= least))
            continue;
        for (int64_t j = i; j < i + LANES && j < vocab; j++) {
            scratch->near[found] = scratch->scores[j];
            found += scratch->scores[j] >= least;
        }
    }
    return found;
}

/* How far the smallest finite score lies below the largest one. */
static float whole_reach(const struct scratch *scratch, int64_t vocab) {
    float least = scratch->peak;
    for (int64_t i = 0; i < vocab; i++)
        if (scratch->scores[i] < least && scratch->scores[i] > -INFINITY)
            least = scratch->scores[i];
    return least < scratch->peak ? scratch->peak - least : 1.0f;
}

static double mass_of(const float *scores, int64_t count, float peak) {
    double total = 0.0;
    for (int64_t first = 0; first < count; first += 16 * LANES) { /* few enough for float32 sums */
        floats sum = {0};
        for (int64_t i = first; i < first + 16 * LANES && i < count; i += LANES) {
            floats x = i + LANES <= count ? load_float32(scores + i) - peak
                                          : load_part(scores, i, count - i, FLOAT32) - peak;
            floats weight = exp_of(x);
            if (i + LANES > count) {
                char kept[BYTES] = {0};
                memcpy(kept, &weight, (count - i) * 4);
                memcpy(&weight, kept, sizeof weight);
            }
            sum += weight;
        }
        total += sum_of(sum);
    }
    return total;
}

/* Sorts the scores of one bucket, largest first, to the front of `near`; returns how many. */
static int64_t sort_bucket(struct scratch *scratch, int64_t count, int64_t bucket) {
    float *near = scratch->near;
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++)
        if (bucket_of(scratch, near[i]) == bucket) {
            float score = near[i];
            near[i] = near[found], near[found++] = score;
        }
    qsort(near, found, sizeof *near, descending);
    return found;
}

/* The k-th largest of `near`, of which there are at least k. */
static float kth_largest(struct scratch *scratch, int64_t count, int64_t k) {
    memset(scratch->counts, 0, sizeof scratch->counts);
    for (int64_t i = 0; i < count; i++)
        scratch->counts[bucket_of(scratch, scratch->near[i])]++;
    int64_t bucket = 0, before = 0;
    while (before + scratch->counts[bucket] < k)
        before += scratch->counts[bucket++];
    sort_bucket(scratch, count, bucket);
    return scratch->near[k - before - 1];
}

static void weigh_buckets(struct scratch *scratch, int64_t count) {
    memset(scratch->masses, 0, sizeof scratch->masses);
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t lanes = count - i < LANES ? count - i : LANES;
        floats weights = exp_of(load_part(scratch->near, i, lanes, FLOAT32) - scratch->peak);
        for (int64_t lane = 0; lane < lanes; lane++)
            scratch->masses[bucket_of(scratch, scratch->near[i + lane])] += weights[lane];
    }
}

/* The smallest score of `near` that less than `allowed` lies above; *may_go_on: so little lies above what is next. */
static float top_p_floor(struct scratch *scratch, int64_t count, double allowed, int *may_go_on) {
    weigh_buckets(scratch, count);
    double above = 0.0, next = scratch->masses[0];
    int64_t bucket = 0, kept = 0;
    for (int64_t i = 1; i < BUCKETS && next < allowed; next += scratch->masses[i++])
        if (scratch->masses[i] > 0.0)
            bucket = i, above = next;
    int64_t found = sort_bucket(scratch, count, bucket);
    for (; kept < found && above < allowed; kept++)
        above += exp((double)scratch->near[kept] - scratch->peak);
    *may_go_on = above < allowed;
    return kept ? scratch->near[kept - 1] : scratch->peak;
}

/* Finds the smallest score that top-k, then top-p keep, among those within reach; returns 0 if it may lie below. */
static int likeliest(struct scratch *scratch, const struct row *row, int64_t vocab, float least, float *floor) {
    int64_t count = gather(scratch, vocab, least);
    int limited = row->top_k > 0 && row->top_k < vocab, may_go_on;
    if (limited) {
        if (row->top_k > count)
            return 0;
        *floor = kth_largest(scratch, count, row->top_k);
        if (row->top_p >= 1.0)
            return 1;
        count = gather(scratch, vocab, *floor);
    }
    double total = limited ? mass_of(scratch->near, count, scratch->peak)
                           : mass_of(scratch->scores, vocab, scratch->peak);
    *floor = top_p_floor(scratch, count, row->top_p * total, &may_go_on);
    return limited || !may_go_on;
}

static float floor_of(struct scratch *scratch, const struct row *row, int64_t vocab) {
    float floor = (float)(scratch->peak + row->log_min_p), kept;
    if ((row->top_k <= 0 || row->top_k >= vocab) && row->top_p >= 1.0)
        return floor;
    scratch->reach = REACH;
    if (!likeliest(scratch, row, vocab, scratch->peak - REACH, &kept)) {
        scratch->reach = whole_reach(scratch, vocab);
        likeliest(scratch, row, vocab, -INFINITY, &kept);
    }
    return kept > floor ? kept : floor;
}

/* The first of the largest sums of score and noise, among scores of at least `floor`.
 *
 * The noise of u is at most -log(u), so at most what u's exponent says: few tokens need more of it computed. */
static int64_t noisy_largest(const float *scores, const struct row *row, int64_t vocab, float floor) {
    const float ln2 = 0.693147181f, slack = 1e-3f, most_noise = 23.0f;
    words ids, best_ids;
    floats best = splat(-INFINITY);
    float reached = -INFINITY;
    for (int lane = 0; lane < LANES; lane++)
        ids[lane] = best_ids[lane] = lane;
    for (int64_t i = 0; i < vocab; i += LANES, ids += LANES) {
        floats x = load_float32(scores + i);
        ints kept = (x >= floor) & (x + most_noise >= reached);
        if (!any(kept))
            continue;
        words bits = bits_of(ids, row->low, row->high);
        ints exponent = (ints)(__builtin_convertvector(bits, floats) + 0.5f) >> 23; /* of 2^32 u, and 127 */
        kept &= x + (__builtin_convertvector(159 - exponent, floats) * ln2 + slack) >= reached;
        if (!any(kept))
            continue;
        floats noisy = choose(kept, x + noise_of(bits), splat(-INFINITY));
        ints better = noisy > best;
        best = choose(better, noisy, best);
        best_ids = (ids & (words)better) | (best_ids & ~(words)better);
        reached = max_of(best);
    }
    return first_of_largest(best, best_ids);
}

INLINE int64_t sample_row(struct scratch *scratch, const struct row *row, int64_t vocab, int type) {
    if (row->temperature == GREEDY || !read_scores(scratch, row, vocab, type))
        return largest_logit(row, vocab, type);
    return noisy_largest(scratch->scores, row, vocab, floor_of(scratch, row, vocab));
}

/* token_ids: [num_rows]. space: vocab + (vocab + LANES) floats for each thread of at most num_threads. */
void pdserve_sample(
    int64_t *token_ids, const struct row *rows, int64_t num_rows, int64_t vocab, float *space, int64_t num_threads
) {
#pragma omp parallel num_threads(num_threads) if (num_rows * vocab >= WORTH_THREADS)
    {
        struct scratch scratch;
        scratch.scores = space + omp_get_thread_num() * (2 * vocab + LANES);
        scratch.near = scratch.scores + vocab + LANES;
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < num_rows; row++)
            token_ids[row] = rows[row].type == FLOAT32 ? sample_row(&scratch, &rows[row], vocab, FLOAT32)
                                                       : sample_row(&scratch, &rows[row], vocab, BFLOAT16);
    }
}
