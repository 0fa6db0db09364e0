/* What the kernels of attention share: the step, and where K and V lie. */

#ifndef PDSERVE_ATTENTION_H
#define PDSERVE_ATTENTION_H

#include "calls.h"
#include "kv_rows.h"
#include "vectors.h"

#define SPLIT 256 /* keys of a range, at most */

/* What all layers of a step share. kernels/cpu/attention.py has the same fields. */
struct step {
    char *pool; /* pages of runs, one for each layer, part and KV head: [page_size, row_bytes]. See `run_of` */
    const float *cos_sin;    /* [ropes, num_tokens, turning]: cosines of turning / 2 angles, then sines */
    const int64_t *targets;  /* [num_tokens, 2]: page and slot that K and V of a token go to */
    const int64_t *table;    /* [num_rows, table_stride]: a row's pages in order */
    const int64_t *begins;   /* [num_rows]: the first position that a row sees */
    const int64_t *ends;     /* [num_rows]: the position after the last one */
    const int64_t *items;    /* [num_items, 2]: row, and the range of its keys */
    const int64_t *first_items; /* [num_rows + 1] */
    float *partials;         /* [num_items, num_heads, head_dim + 2]: sums, largest score, sum of weights */
    const int64_t *blocks;          /* [num_blocks, 2]: of chunks of more tokens: chunk, and the block's first token in it */
    const int64_t *chunk_starts;    /* [num_chunks + 1]: a chunk's first token, and the end */
    const int64_t *chunk_positions; /* [num_chunks]: of that token */
    const int64_t *chunk_table;     /* [num_chunks, chunk_table_stride]: a chunk's pages in order */
    int64_t chunk_table_stride, num_blocks, window; /* window: 0 where each token sees all before it */
    int64_t table_stride, num_tokens, num_rows, num_items, num_keys;
    int64_t num_layers, num_heads, num_kv_heads, head_dim, page_size, type; /* type: of q, k, v and results */
    int64_t kv, row_bytes; /* the form of rows in the pool, see kv_rows.h, and their bytes */
    int64_t page_bytes, layer_bytes, part_bytes, head_bytes; /* from one page to the next, and from run to run in it */
    int64_t parts;      /* rows of a token: 2, K and V, or 1 for both, a latent and the key that turns behind it */
    int64_t turning;    /* features of queries and keys that turn, the last ones */
    int64_t value_dim;  /* features of results that count, the first ones */
    int64_t block_tokens; /* queries of a block */
    double scale;    /* of scores */
    double soft_cap; /* c of c * tanh(score / c), where it is above 0 */
};

/* Whether rows are both keys and values, and latents.c attends. */
INLINE int is_latent(const struct step *step) {
    return step->parts == 1 && step->kv == BFLOAT16 && step->head_dim % 32 == 0;
}

/* See `pdserve_ranges` and `pdserve_blocks`. */
void pdserve_latent_range(const struct call *call, int64_t item);
void pdserve_latent_block(const struct call *call, int64_t block);

/* The run of one page, layer and KV head: [page_size] rows. which: 0 for K, 1 for V. */
INLINE char *run_of(const struct step *step, int64_t page, int64_t layer, int64_t which, int64_t head) {
    int64_t in_page = layer * step->layer_bytes + which * step->part_bytes + head * step->head_bytes;
    return step->pool + page * step->page_bytes + in_page;
}

INLINE floats soft_capped(floats scores, float cap) { return tanh_of(scores / cap) * cap; }

#endif
