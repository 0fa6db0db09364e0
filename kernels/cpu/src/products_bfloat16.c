/* Products with weights in bfloat16, or in FP8 (e4m3), by dot products of pairs.
 *
 * A tile holds, for each pair of inputs, the pairs of 32 outputs: [tiles][inputs / 2][32][2]. In FP8 it is cut into
 * segments of 128 inputs, or fewer in the last one: 32 scales (float32), then the pairs. One stream of weights serves up
 * to MOST_ROWS rows at once.
 */

#include "fp8.h"
#include "matrix_unit.h"
#include "products.h"

#if defined(HAS_MATRIX_UNIT)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(HAS_PAIRS)
#define MOST_ROWS 12
#else
#define MOST_ROWS 4 /* widened, they lie on the stack */
#endif
#define STREAMED_ROWS 4 /* up to here memory is the limit, and the next tile is asked for early */
#define SEGMENT 128     /* inputs of FP8 that share an output's scale */
#define SCALES_BYTES (TILE * 4)
#define NEAR_INPUTS 1024 /* on a matrix unit: a block's rows of so many stay in a core's cache */
#define NEAR_TILES 8     /* while so many tiles pass by */

/* Puts into sums [rows][parts] the products of `count` inputs; weights: of the first pair. ahead: from there to what is
 * asked for early, or 0. bytes: of a weight. */
INLINE void sum_pairs(
    floats *sums, const char *weights, const element *x, int64_t x_stride, int64_t count, int64_t ahead, const int rows,
    const int parts, const int bytes
) {
#pragma GCC unroll 24
    for (int i = 0; i < rows * parts; i++)
        sums[i] = splat(0.0f);
    for (int64_t pair = 0; pair < count / 2; pair++) {
        const char *here = weights + pair * 2 * TILE * bytes;
        pairs columns[PARTS];
        if (bytes == 1)
            load_fp8_pairs(columns, here, parts);
#pragma GCC unroll 8
        for (int part = 0; part < parts; part++) {
            if (bytes == 2)
                columns[part] = load_pairs(here + part * 4 * LANES);
            if (ahead && part * LANES * bytes % 32 == 0)
                __builtin_prefetch(here + ahead + part * 2 * LANES * bytes, 0, 2);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            pairs both = splat_pair(x + r * x_stride + 2 * pair);
#pragma GCC unroll 8
            for (int part = 0; part < parts; part++)
                sums[r * parts + part] = add_products(sums[r * parts + part], columns[part], both);
        }
    }
}

INLINE void multiply(const struct call *call, int64_t row, int64_t tile, const int rows) {
    const int parts = parts_at_once(rows);
    const int64_t inputs = call->inputs, tile_bytes = inputs * TILE * 2, ahead = rows <= STREAMED_ROWS ? tile_bytes : 0;
    const char *here = (const char *)call->weights + tile * tile_bytes;
    const uint16_t *from = (const uint16_t *)call->x + row * call->x_stride;
    element room[rows][WIDENED(inputs)];
    const element *x = widened(room[0], from, inputs);
    for (int r = 1; r < rows; r++)
        widened(room[r], from + r * call->x_stride, inputs);
    floats sums[MOST_ROWS][PARTS], some[SUM_REGISTERS];
    for (int first = 0; first < PARTS; first += parts) {
        const int64_t x_stride = x == room[0] ? inputs : call->x_stride;
        sum_pairs(some, here + first * 4 * LANES, x, x_stride, inputs, ahead, rows, parts, 2);
#pragma GCC unroll 24
        for (int i = 0; i < rows * parts; i++)
            sums[i / parts][first + i % parts] = some[i];
    }
    finish(call, row, tile, sums, rows);
}

static int may_use_matrix_unit; /* as the kernel says */
static int has_matrix_unit;     /* and it is used */

#if defined(HAS_MATRIX_UNIT)
#define REQUEST_PERMISSION 0x1023 /* of arch_prctl, for a part of a thread's state */
#define TILE_DATA 18

__attribute__((constructor)) static void ask_for_matrix_unit(void) {
    may_use_matrix_unit = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    has_matrix_unit = may_use_matrix_unit;
}

/* Multiplies rows of a block with tiles that follow one another, on the matrix unit. */
static void multiply_on_unit(const struct call *call, int64_t row, int64_t tile, int64_t rows, int64_t num_tiles) {
    const int64_t inputs = call->inputs, tile_bytes = inputs * TILE * 2, is_near = inputs <= NEAR_INPUTS;
    const char *weights = (const char *)call->weights + tile * tile_bytes;
    const uint16_t *x = (const uint16_t *)call->x + row * call->x_stride;
    floats room[is_near ? 1 : NEAR_TILES][is_near ? MOST_UNIT_ROWS : BLOCK_ROWS][PARTS];
    struct unit_inputs of = {.x_stride = call->x_stride, .ahead = rows <= STREAMED_ROWS ? tile_bytes : 0};
    int64_t configured = 0;
    for (int64_t input = 0; input < inputs; input += NEAR_INPUTS) {
        of.count = inputs - input < NEAR_INPUTS ? inputs - input : NEAR_INPUTS;
        of.is_first = input == 0;
        for (int64_t place = 0; place < num_tiles; place++) {
            of.weights = weights + place * tile_bytes + input * TILE * 2;
            for (int64_t first = 0; first < rows; first += MOST_UNIT_ROWS) {
                floats(*sums)[PARTS] = is_near ? room[0] : room[place] + first;
                of.x = x + first * call->x_stride + input;
                of.rows = rows - first < MOST_UNIT_ROWS ? rows - first : MOST_UNIT_ROWS;
                if (of.rows != configured)
                    configure_unit(configured = of.rows);
                if (of.rows > UNIT_ROWS)
                    sum_on_unit((float *)sums, &of, 1);
                else
                    sum_on_unit((float *)sums, &of, 0);
                if (input + of.count == inputs)
                    finish(call, row + first, tile + place, sums, of.rows);
            }
        }
    }
    _tile_release();
}
#else
#define multiply_on_unit(...) (void)count
#endif

/* A segment of a tile in FP8: `count` inputs, in FP8 or widened to bfloat16. */
struct segment {
    const char *weights;
    const float *scales;
    int64_t count;
    int64_t ahead; /* as `sum_pairs` takes it */
};

/* Adds the products of a segment, times its scales. from: the rows' inputs. bytes: of a weight. */
INLINE void add_segment(
    floats sums[][PARTS], const struct segment *of, const uint16_t *from, int64_t x_stride, const int bytes, const int rows
) {
    const int parts = parts_at_once(rows);
    element room[rows][WIDENED(SEGMENT)];
    const element *x = widened(room[0], from, of->count);
    for (int r = 1; r < rows; r++)
        widened(room[r], from + r * x_stride, of->count);
    floats some[SUM_REGISTERS];
    for (int first = 0; first < PARTS; first += parts) {
        const char *weights = of->weights + first * 2 * LANES * bytes;
        sum_pairs(some, weights, x, x == room[0] ? SEGMENT : x_stride, of->count, of->ahead, rows, parts, bytes);
#pragma GCC unroll 24
        for (int i = 0; i < rows * parts; i++)
            sums[i / parts][first + i % parts] += some[i] * load_float32(of->scales + (first + i % parts) * LANES);
    }
}

#define CASE(rows, of, ...) \
    case rows: \
        of(__VA_ARGS__, rows); \
        break;
#define FOUR_CASES(rows, ...) \
    CASE(rows, __VA_ARGS__) CASE(rows + 1, __VA_ARGS__) CASE(rows + 2, __VA_ARGS__) CASE(rows + 3, __VA_ARGS__)
#if defined(HAS_PAIRS)
#define ALL_CASES(...) FOUR_CASES(1, __VA_ARGS__) FOUR_CASES(5, __VA_ARGS__) FOUR_CASES(9, __VA_ARGS__)
#else
#define ALL_CASES(...) FOUR_CASES(1, __VA_ARGS__)
#endif

/* Multiplies rows of a block with a tile. */
static void multiply_bfloat16(const struct call *call, int64_t row, int64_t tile, int64_t rows) {
    for (int64_t parts = parts_of(rows, MOST_ROWS), part = 0; part < parts; part++) {
        const int64_t first = part * rows / parts;
        switch ((part + 1) * rows / parts - first) { ALL_CASES(multiply, call, row + first, tile) }
    }
}

/* The same in FP8. For rows of many parts a segment is widened once, into a panel that stays in the nearest cache, and
 * the next one is asked for while the parts are multiplied. */
static void multiply_fp8(const struct call *call, int64_t row, int64_t tile, int64_t rows) {
    const int64_t inputs = call->inputs, parts = parts_of(rows, MOST_ROWS), x_stride = call->x_stride;
    const int64_t tile_bytes = inputs * TILE + (inputs + SEGMENT - 1) / SEGMENT * SCALES_BYTES;
    const int is_widened = parts > 2;
    const char *here = (const char *)call->weights + tile * tile_bytes;
    const uint16_t *x = (const uint16_t *)call->x + row * x_stride;
    char panel[SEGMENT * TILE * 2] __attribute__((aligned(64)));
    floats sums[BLOCK_ROWS][PARTS];
    memset(sums, 0, rows * sizeof sums[0]);
    for (int64_t input = 0; input < inputs; input += SEGMENT, x += SEGMENT) {
        const int64_t left = inputs - input, count = left < SEGMENT ? left : SEGMENT, bytes = count * TILE;
        const char *codes = here + SCALES_BYTES;
        const struct segment of = {is_widened ? panel : codes, (const float *)here, count, is_widened ? 0 : tile_bytes};
        here = codes + bytes;
        for (int64_t i = 0; is_widened && i < bytes; i += 2 * TILE)
            widen_fp8(panel + 2 * i, codes + i);
        for (int64_t part = 0; part < parts; part++) {
            const int64_t first = part * rows / parts, number = (part + 1) * rows / parts - first;
            if (is_widened) {
                for (int64_t i = part * bytes / parts; i < (part + 1) * bytes / parts; i += 64)
                    __builtin_prefetch(here + i, 0, 3);
                switch (number) { ALL_CASES(add_segment, sums + first, &of, x + first * x_stride, x_stride, 2) }
            } else {
                switch (number) { ALL_CASES(add_segment, sums + first, &of, x + first * x_stride, x_stride, 1) }
            }
        }
    }
    finish(call, row, tile, sums, rows);
}

/* Whether products take no longer than float32's, as far as that was measured. */
int64_t pdserve_multiplies_bfloat16(void) {
#if defined(HAS_PAIRS) || (defined(__AVX2__) && !defined(__AVX512F__))
    return 1;
#else
    return 0;
#endif
}

int64_t pdserve_has_matrix_unit(void) { return has_matrix_unit; }

/* Leaves it, or takes it again, where there is one; to measure and to test. */
void pdserve_use_matrix_unit(int64_t wanted) { has_matrix_unit = wanted && may_use_matrix_unit; }

/* How many rows a stream of weights serves at once. */
INLINE int64_t most_rows(const struct call *call) {
    return has_matrix_unit && call->bits != 8 ? MOST_UNIT_ROWS : MOST_ROWS;
}

int64_t pdserve_units_bfloat16(const struct call *call, int64_t rows) { return units_of(call, rows, most_rows(call)); }

/* inputs: an even number, at most 32,768; weights: as above. */
void pdserve_product_bfloat16(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const int64_t tiles = tiles_of(call), most = most_rows(call);
    const int64_t parts = parts_of(rows, most), parts_of_block = BLOCK_ROWS / most;
    for (int64_t unit = begin, count = 1; unit < end; unit += count) {
        const int64_t part = unit / tiles * parts_of_block, after = part + parts_of_block, tile = unit % tiles;
        const int64_t row = part * rows / parts, last = (after < parts ? after : parts) * rows / parts;
        if (call->bits == 8)
            multiply_fp8(call, row, tile, last - row);
        else if (!has_matrix_unit)
            multiply_bfloat16(call, row, tile, last - row);
        else {
            const int64_t left = tiles - tile < end - unit ? tiles - tile : end - unit;
            count = left < NEAR_TILES ? left : NEAR_TILES;
            multiply_on_unit(call, row, tile, last - row, count);
        }
    }
}

int64_t pdserve_units_heads(const struct call *call, int64_t rows) {
    return call->num_heads * pdserve_units_bfloat16(call, rows);
}

/* Multiplies some inputs of each row with each head's own tiles, which follow one another. No bias, no residual. */
void pdserve_product_heads(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const int64_t units = pdserve_units_bfloat16(call, rows), head_bytes = tiles_of(call) * TILE * call->inputs * 2;
    struct call of;
    memcpy(&of, call, offsetof(struct call, taken));
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t head = unit / units;
        of.x = (char *)call->x + head * call->x_head * 2;
        of.out = (char *)call->out + head * call->width * 2;
        of.weights = (const char *)call->weights + head * head_bytes;
        pdserve_product_bfloat16(&of, rows, unit % units, unit % units + 1);
    }
}

/* Copies rows of the matrix that a call's x names, times the scale. width: rows of the matrix. */
void pdserve_lookup_bfloat16(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const int64_t *ids = call->x, pairs = call->inputs / 2;
    (void)rows;
    for (int64_t row = begin; row < end; row++) {
        const int64_t id = ids[row] - call->first;
        char *to = (char *)call->out + row * call->out_stride * 2;
        if (id < 0 || id >= call->width) {
            memset(to, 0, (size_t)call->inputs * 2);
            continue;
        }
        const uint32_t *from = (const uint32_t *)call->weights + id / TILE * TILE * pairs + id % TILE;
        for (int64_t pair = 0; pair < pairs; pair++)
            memcpy(to + 4 * pair, from + pair * TILE, 4);
        scale_row(to, call->inputs, (float)call->scale, BFLOAT16);
    }
}
