/* Gives each worker of a machine processors of its own while several of them compute.
 *
 * All workers map one file, in which each has a seat. A computing worker writes the time into its seat, so a worker
 * computes now if the time in its seat is recent. Computing workers divide the processors in the order of their seats,
 * and bind their threads to their part. A worker that computes alone uses all processors, beginning where its part was.
 * No worker waits for another, and one that is dead or stopped no longer counts. */

#define _GNU_SOURCE

#include "seats.h"

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define MOST_SEATS 16      /* as pdserve/executor/threads.py has it */
#define RECENT_NS 50000000 /* longer than between two steps of a decoding worker, or two beats in a prompt */

struct seat {
    _Atomic int64_t computed; /* when, in ns of CLOCK_MONOTONIC, which all processes of a machine share */
    char unused[56];          /* of a cache line */
};

static struct seat *_Atomic mine; /* NULL: there are no others */
static struct seat *seats;
static int64_t num_processors, own_first; /* OpenMP's first place is this processor, by its rank among all */
static int64_t first;                     /* where the threads are bound */

static int64_t clock_ns(void) {
    struct timespec clock;
    clock_gettime(CLOCK_MONOTONIC, &clock);
    return clock.tv_sec * 1000000000LL + clock.tv_nsec;
}

void pdserve_bind(int64_t place) {
    const int64_t places = omp_get_num_places();
    if (places < 1)
        return;
    const int index = (int)(place % places), count = omp_get_place_num_procs(index);
    int processors[count];
    omp_get_place_proc_ids(index, processors);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < count; i++)
        CPU_SET(processors[i], &set);
    sched_setaffinity(0, sizeof set, &set);
}

/* Takes a seat among MOST_SEATS, for a process whose threads OpenMP has bound to `processors` processors from `begin`
 * on. Returns 0, and changes nothing, if they are not bound so. The seats must exist as long as the process. */
int64_t pdserve_take_seat(struct seat *all, int64_t index, int64_t processors, int64_t begin) {
    if (omp_get_num_places() != processors || omp_get_place_num() < 0)
        return 0;
    seats = all;
    num_processors = processors;
    own_first = first = begin;
    atomic_store(&mine, &all[index]);
    return 1;
}

/* Returns how many processors a seat's worker uses at the time `now`. If other workers compute, `*begin` is set to the
 * first of these processors. */
int64_t pdserve_share(struct seat *all, int64_t index, int64_t processors, int64_t now, int64_t *begin) {
    int64_t rank = 0, count = 1;
    for (int64_t other = 0; other < MOST_SEATS; other++) {
        const int64_t computed = atomic_load_explicit(&all[other].computed, memory_order_relaxed);
        if (other != index && llabs(now - computed) < RECENT_NS) { /* a little later than now, if it beats meanwhile */
            count++;
            rank += other < index;
        }
    }
    if (count == 1)
        return processors;
    *begin = rank * processors / count;
    const int64_t share = (rank + 1) * processors / count - *begin;
    return share ? share : 1;
}

int64_t pdserve_threads_beside_others(int64_t num_threads, int64_t *place) {
    struct seat *seat = atomic_load_explicit(&mine, memory_order_relaxed);
    *place = 0;
    if (!seat)
        return num_threads;
    const int64_t before = first, share = pdserve_share(seats, seat - seats, num_processors, clock_ns(), &first);
    *place = (first - own_first + num_processors) % num_processors;
    if (first != before) {
#pragma omp parallel
        pdserve_bind(*place + omp_get_thread_num());
    }
    return share < num_threads ? share : num_threads;
}

void pdserve_beat(void) {
    struct seat *seat = atomic_load_explicit(&mine, memory_order_relaxed);
    if (seat)
        atomic_store_explicit(&seat->computed, clock_ns(), memory_order_relaxed);
}
