/* Lets each worker of a machine compute on processors of its own while several of them compute.
 *
 * All workers map one file, in which each has a seat. A worker counts its seat up while it computes; others compute at
 * the moment if their counts have changed a short time ago. The threads of a worker are bound to processors one after
 * the other, from the seat's first one on. Beside others it uses those before the next worker's first processor. Nobody
 * waits for anybody, and a worker that is dead or stopped counts no more. */

#define _GNU_SOURCE

#include "seats.h"

#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#define MOST_SEATS 16       /* as pdserve/worker/seats.py has it */
#define RECENT_NS 50000000  /* longer than from one step of a decoding worker to the next, or a piece of a prompt */
#define LONG_AGO (INT64_MIN / 2)

struct seat {
    _Atomic uint64_t count;
    char unused[56]; /* of a cache line */
};

static struct seat *_Atomic mine; /* NULL: there are no others */
static struct seat *seats;
static int64_t num_processors, distances[MOST_SEATS]; /* from this worker's first processor to that of each seat */

static struct {
    uint64_t count;
    int64_t at; /* when it was first seen, by this process's clock */
} seen[MOST_SEATS];

/* Takes a seat among MOST_SEATS, of which each begins at one of so many processors. `processor` is the system's number of
 * this seat's. Returns 0 if OpenMP has not bound the calling thread to it: then nothing changes. Seats have to stay for as
 * long as the process. */
int64_t pdserve_take_seat(struct seat *all, int64_t index, const int64_t *firsts, int64_t processors, int64_t processor) {
#pragma omp parallel
    __asm__ volatile(""); /* a thread is bound when it first has a team */
    cpu_set_t bound;
    if (sched_getaffinity(0, sizeof bound, &bound) || CPU_COUNT(&bound) != 1 || !CPU_ISSET((int)processor, &bound))
        return 0;
    seats = all;
    num_processors = processors;
    for (int64_t other = 0; other < MOST_SEATS; other++) {
        distances[other] = (firsts[other] - firsts[index] + processors) % processors;
        seen[other].count = atomic_load(&all[other].count);
        seen[other].at = LONG_AGO;
    }
    atomic_store(&mine, &all[index]);
    return 1;
}

int64_t pdserve_threads_beside_others(int64_t num_threads) {
    if (!atomic_load_explicit(&mine, memory_order_relaxed) || num_threads < num_processors)
        return num_threads;
    struct timespec clock;
    clock_gettime(CLOCK_MONOTONIC, &clock);
    const int64_t now = clock.tv_sec * 1000000000LL + clock.tv_nsec;
    for (int64_t other = 0; other < MOST_SEATS; other++) {
        const uint64_t count = atomic_load_explicit(&seats[other].count, memory_order_relaxed);
        if (count != seen[other].count) {
            seen[other].count = count;
            seen[other].at = now;
        }
        const int64_t free = distances[other]; /* 0: that worker begins at the same processor, so both share it */
        if (free && free < num_threads && now - seen[other].at < RECENT_NS)
            num_threads = free;
    }
    return num_threads;
}

void pdserve_beat(void) {
    struct seat *seat = atomic_load_explicit(&mine, memory_order_relaxed);
    if (seat)
        atomic_fetch_add_explicit(&seat->count, 1, memory_order_relaxed);
}
