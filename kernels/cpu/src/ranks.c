/* Sums, gathered rows and passed rows of the ranks of a worker, which are processes, in memory that all of them map.
 *
 * Each rank has a slot with two parts, which it writes in turn. In an exchange a rank writes a part, publishes its
 * number, waits until all others have published theirs, and reads the parts in the order of ranks. So all ranks get the
 * same sums, to the bit. A rank writes a part again two exchanges later: the others have published the number between
 * only after they had read it.
 *
 * A waiting rank spins for a short time and then sleeps, so that a stopped rank costs no processor time. A rank that
 * ends is noticed by its worker. One that hangs is noticed here: then this rank takes part in no exchange any more. */

#define _GNU_SOURCE

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "calls.h"
#include "vectors.h"

#define PART_BYTES 131072 /* as kernels/cpu/ranks.py has it */
#define SPINS 1000       /* some 25 microseconds; then the core is left to others */
#define NAP_NS 100000000 /* a sleep is as long if nobody publishes; a stop of this process counts as one */

struct slot {
    _Atomic uint32_t number;   /* of the last part that is written */
    _Atomic uint32_t sleepers; /* ranks that sleep until the next one is */
    char unused[56];           /* of a cache line */
    char parts[2][PART_BYTES];
};

/* One rank's view. kernels/cpu/ranks.py has the same fields. */
struct ranks {
    struct slot *slots;
    int64_t index, size;
    int64_t patience; /* sleeps in an exchange */
    int64_t number;   /* of this rank's last exchange */
    int64_t missing;  /* the rank that has not come; 0: none, 1: the first one */
};

static void publish(struct slot *own, uint32_t number) {
    atomic_store(&own->number, number);
    if (atomic_load(&own->sleepers))
        syscall(SYS_futex, &own->number, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Another rank may be an exchange ahead. */
static int has_published(struct slot *slot, uint32_t number, uint32_t *seen) {
    *seen = atomic_load(&slot->number);
    return (int32_t)(*seen - number) >= 0;
}

static int wait_for(struct slot *slot, uint32_t number, int64_t patience) {
    uint32_t seen;
    for (int64_t spins = 0; spins < SPINS; spins++) {
        if (has_published(slot, number, &seen))
            return 1;
        pause_a_little();
    }
    atomic_fetch_add(&slot->sleepers, 1);
    while (!has_published(slot, number, &seen) && patience > 0) {
        const struct timespec nap = {.tv_nsec = NAP_NS};
        if (syscall(SYS_futex, &slot->number, FUTEX_WAIT, seen, &nap, NULL, 0) && errno == ETIMEDOUT)
            patience--;
    }
    atomic_fetch_sub(&slot->sleepers, 1);
    return has_published(slot, number, &seen);
}

/* Gives the others this rank's part, and waits for theirs. Returns which of the two parts it is, or -1. */
static int exchange(struct ranks *ranks, const char *part, int64_t bytes) {
    if (ranks->missing)
        return -1;
    struct slot *own = &ranks->slots[ranks->index];
    const uint32_t number = (uint32_t)++ranks->number;
    memcpy(own->parts[number & 1], part, (size_t)bytes);
    publish(own, number);
    for (int64_t rank = 0; rank < ranks->size; rank++)
        if (!wait_for(&ranks->slots[rank], number, ranks->patience)) {
            ranks->missing = rank + 1;
            return -1;
        }
    return (int)(number & 1);
}

/* The sum of `count` < LANES elements, or of LANES if it is 0. */
INLINE floats sum_at(const struct ranks *ranks, int part, int64_t index, int64_t count, int type) {
    floats sum = splat(0.0f);
    for (int64_t rank = 0; rank < ranks->size; rank++) {
        const char *from = ranks->slots[rank].parts[part];
        const floats term = count ? load_part(from, index, count, type) : load(from, index, type);
        sum = rank ? sum + term : term;
    }
    return sum;
}

INLINE void sum_parts(const struct call *call, int part, int64_t first, int64_t count, int type) {
    const int64_t whole = count - count % LANES, rest = count - whole, bytes = first * size_of(type);
    const char *residual = call->residual ? (const char *)call->residual + bytes : NULL;
    char *out = (char *)call->out + bytes;
    const float scale = (float)call->scale;
    for (int64_t i = 0; i < whole; i += LANES) {
        const floats sum = sum_at(call->ranks, part, i, 0, type) * scale;
        store(out, i, residual ? sum + load(residual, i, type) : sum, type);
    }
    if (rest) {
        const floats sum = sum_at(call->ranks, part, whole, rest, type) * scale;
        store_part(out, whole, rest, residual ? sum + load_part(residual, whole, rest, type) : sum, type);
    }
}

/* x, residual, out: [rows, width], without gaps; out may be the residual. All work is one unit. */
void pdserve_ranks_sum(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    const int64_t total = rows * call->width, size = size_of((int)call->type), most = PART_BYTES / size;
    (void)begin, (void)end;
    for (int64_t first = 0; first < total; first += most) {
        const int64_t count = total - first < most ? total - first : most;
        const int part = exchange(call->ranks, (const char *)call->x + first * size, count * size);
        if (part < 0)
            return;
        if (call->type == FLOAT32)
            sum_parts(call, part, first, count, FLOAT32);
        else
            sum_parts(call, part, first, count, BFLOAT16);
    }
}

/* Puts the columns of all ranks side by side on the first rank. x: [rows, own columns]; out: [rows, width], of which
 * each rank has a share as `Shard` of pdserve/model/weights.py divides it. All work is one unit. */
void pdserve_ranks_gather(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    struct ranks *ranks = call->ranks;
    const int64_t size = size_of((int)call->type), most = PART_BYTES / size, widest = call->width / ranks->size + 1;
    (void)begin, (void)end;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t first = 0; first < widest; first += most) {
            int64_t starts[ranks->size], counts[ranks->size];
            for (int64_t rank = 0; rank < ranks->size; rank++) {
                starts[rank] = rank * call->width / ranks->size + first;
                const int64_t left = (rank + 1) * call->width / ranks->size - starts[rank];
                counts[rank] = left < 0 ? 0 : left < most ? left : most;
            }
            const char *own = (const char *)call->x + (row * call->x_stride + first) * size;
            const int part = exchange(ranks, own, counts[ranks->index] * size);
            if (part < 0)
                return;
            char *out = (char *)call->out + row * call->out_stride * size;
            for (int64_t rank = 0; rank < ranks->size && !ranks->index; rank++)
                memcpy(out + starts[rank] * size, ranks->slots[rank].parts[part], (size_t)(counts[rank] * size));
        }
}

/* Copies x of the first of two ranks into out of the second: rows of `width` bytes, without gaps. All work is one
 * unit. The first rank waits, too, so it is never more than a call ahead. */
void pdserve_ranks_pass(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    struct ranks *ranks = call->ranks;
    const int64_t total = rows * call->width;
    (void)begin, (void)end;
    for (int64_t first = 0; first < total; first += PART_BYTES) {
        const int64_t count = total - first < PART_BYTES ? total - first : PART_BYTES;
        const int part = exchange(ranks, (const char *)call->x + first, ranks->index ? 0 : count);
        if (part < 0)
            return;
        if (ranks->index)
            memcpy((char *)call->out + first, ranks->slots[0].parts[part], (size_t)count);
    }
}
