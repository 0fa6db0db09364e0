/* Layers that keep a state of each sequence in a page: the last inputs of a convolution, then the memory of heads. */

#ifndef PDSERVE_STATES_H
#define PDSERVE_STATES_H

#include <stdint.h>

/* Tokens of a short chunk: of one that decodes, with guesses, as many as the engine verifies at once. */
#define MOST_SHORT 16

/* What all layers of a step share; a chunk is a run of one sequence's tokens, and a piece a part of it behind which there
 * is a state (kernels/state_pieces.py). kernels/cpu/states.py has the same fields. */
struct states {
    float *pool;           /* [num_pages, page_floats] */
    const int64_t *starts; /* [num_chunks + 1]: a chunk's first token, and the end */
    const int64_t *chunks; /* [num_tokens]: of which chunk a token is */
    const int64_t *before; /* [num_chunks]: the page of the state before the chunk; below 0: there is none */
    const int64_t *ended;  /* [num_tokens]: the piece of which a token is the last one; below 0: of none */
    const int64_t *pages;  /* [num_pieces]: where the state behind a piece belongs; below 0: it is not kept */
    int64_t page_floats, num_chunks, num_pieces;
    int64_t num_short;    /* the first chunks, of at most MOST_SHORT tokens each */
    int64_t short_pieces; /* of these chunks */
};

/* Channels that follow one another in a row of kept inputs, too: number i lies there at `offset + i`. */
struct run {
    int64_t begin, end, offset;
};

/* One layer. What it takes in is a row of `inputs_at` and so on; what it convolves, a row of floats: `channels`, then
 * of each head what is left of its memory, then how much it learns. kernels/cpu/states.py has the same fields. */
struct recurrence {
    const float *weight; /* [kernel, channels]; the last is that of the token itself */
    const float *bias;   /* [channels], or NULL */
    int64_t channels, kernel, kept_at; /* kept_at: of the last inputs in a state, [kernel - 1, kept_width] */
    int64_t inputs_at, gates_at;
    int64_t before_at;                 /* where there are no heads: what inputs are multiplied with */
    int64_t heads, groups, key_dim, value_dim, memory_at; /* memory_at: of [heads, key_dim, value_dim] in a state */
    int64_t q_at, k_at, v_at;          /* of groups and heads among the channels */
    int64_t rates_at, betas_at;        /* betas_at: of the delta rule */
    int64_t corrects;                  /* it is the delta rule, whose q and k have length 1 */
    const float *rate, *rate_bias;     /* [heads] */
    const float *direct;               /* [heads]: how much of v goes straight into results, or NULL */
    const void *norm;                  /* [norm_width], of the type of x, or NULL */
    int64_t norm_width, norm_part;     /* norm_part: features that are normalized together */
    int64_t gates_first, rounds;       /* rounds: what is normalized, and its product with weights, as x is */
    double eps, scale;                 /* scale: of results, once they are rounded */
    int64_t kept_width, num_runs;      /* kept_width: channels of a row of kept inputs, which all ranks share */
    const struct run *runs;            /* of the channels, all of them in order */
};

#endif
