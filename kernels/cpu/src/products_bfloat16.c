/* Products with bfloat16 weights, by the processor's dot products of pairs.
 *
 * A tile holds, for each pair of inputs, the pairs of 32 outputs: [tiles][inputs / 2][32][2]. One stream of weights
 * serves up to 12 rows at once.
 */

#include "products.h"

#define MOST_ROWS 12
#define STREAMED_ROWS 4 /* up to here memory is the limit, and the next tile is asked for early */

#if defined(__AVX512BF16__)

struct task {
    const uint16_t *x, *weights;
    int64_t x_stride, inputs;
    struct outcome to;
};

/* Kept out of `multiply`, of which there are as many as there are counts of rows. */
static __attribute__((noinline)) void finish_row(
    const struct outcome *to, int64_t row, int64_t tile, __m512 first, __m512 second
) {
    finish(to, row, tile, (floats)first, (floats)second, BFLOAT16);
}

INLINE void multiply(const struct task *task, int64_t row, int64_t tile, const int rows) {
    __m512 first[MOST_ROWS], second[MOST_ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        first[r] = second[r] = _mm512_setzero_ps();
    const int64_t pairs = task->inputs / 2, x_stride = task->x_stride;
    const uint16_t *weights = task->weights + tile * TILE * task->inputs, *x = task->x + row * x_stride;
    for (int64_t pair = 0; pair < pairs; pair++) {
        const uint16_t *here = weights + pair * 2 * TILE;
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(here), w1 = (__m512bh)_mm512_loadu_si512(here + TILE);
        if (rows <= STREAMED_ROWS) {
            _mm_prefetch((const char *)(here + TILE * task->inputs), _MM_HINT_T1);
            _mm_prefetch((const char *)(here + TILE * task->inputs + TILE), _MM_HINT_T1);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t both;
            memcpy(&both, x + r * x_stride + 2 * pair, sizeof both);
            __m512bh inputs = (__m512bh)_mm512_set1_epi32(both);
            first[r] = _mm512_dpbf16_ps(first[r], w0, inputs);
            second[r] = _mm512_dpbf16_ps(second[r], w1, inputs);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        finish_row(&task->to, row + r, tile, first[r], second[r]);
}

#define CASE(rows) \
    case rows: \
        multiply(task, row, tile, rows); \
        break;

static void multiply_some(const struct task *task, int64_t row, int64_t tile, int64_t rows) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

int64_t pdserve_multiplies_bfloat16(void) { return 1; }

/* out: [rows, width]; x: [rows, inputs], an even number; weights: as above; strides in elements. */
void pdserve_product_bfloat16(
    void *out, int64_t out_stride, const void *x, int64_t x_stride, int64_t rows, int64_t inputs, const void *weights,
    const void *bias, const void *residual, int64_t residual_stride, int64_t width, int64_t after
) {
    const struct outcome to = {out, out_stride, bias, residual, residual_stride, width, after};
    const struct task task = {x, weights, x_stride, inputs, to};
    const int64_t tiles = tiles_of(&to), parts = parts_of(rows, MOST_ROWS), parts_of_block = BLOCK_ROWS / MOST_ROWS;
    const int64_t pieces = tiles * parts_of(parts, parts_of_block), run = run_length(pieces);
#pragma omp parallel for schedule(dynamic, run)
    for (int64_t piece = 0; piece < pieces; piece++) {
        int64_t begin = piece / tiles * parts_of_block, end = begin + parts_of_block;
        for (int64_t part = begin; part < end && part < parts; part++) {
            int64_t row = part * rows / parts;
            multiply_some(&task, row, piece % tiles, (part + 1) * rows / parts - row);
        }
    }
}

#else

int64_t pdserve_multiplies_bfloat16(void) { return 0; }

#endif
