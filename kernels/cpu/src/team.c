/* Runs a program in a team of threads, none of which waits for a thread that the kernel does not run.
 *
 * Other processes compute on the same cores: another worker, a router, clients. With barriers, a thread whose core is
 * taken would hold up all others at each call of a step. So there are no barriers. A running thread takes the next
 * pieces of a call. A call is over when its pieces are done, by whichever thread. A late thread goes on to the call that
 * is being computed. Threads wait only for pieces that are begun.
 *
 * A program's calls carry the number of the run, so that a thread that is still at an earlier run takes nothing. The
 * call after the last one carries no run's number, or an earlier run's: there all threads stop. */

#define _GNU_SOURCE

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "calls.h"
#include "seats.h"

#define MOST_HELPERS 255
#define SPINS 2000       /* some ten microseconds; then the core is left to others */
#define NAP_NS 20000     /* then it looks again: see is_done */
#define LONGER_NS 625    /* each nap than the one before it */
#define REST_SPINS 4000  /* between runs, before a helper sleeps */
#define MANY_ROWS 64     /* WORTH_TEAM of kernels/cpu/calls.py: their pieces take long */
#define MOMENT (1 << 23) /* rows, inputs and units multiplied: at most some milliseconds */

/* taken: the run's number, the count of pieces, and of those taken; done: the run's number and a count. */
#define NUMBER_SHIFT 16
#define COUNT_SHIFT 8
#define COUNT_MASK 255

static struct {
    struct call *_Atomic calls;
    _Atomic int64_t rows, num_threads, place; /* place: the caller's, see seats.h */
} job;

static struct helper {
    _Atomic uint32_t number; /* of the last run that this helper is to take part in; it sleeps on it */
    _Atomic uint32_t sleeping;
} helpers[MOST_HELPERS];

static atomic_flag is_taken = ATOMIC_FLAG_INIT; /* the helpers, by a thread that runs a program */
static int64_t num_helpers;                     /* only that thread starts more */
static uint32_t last_number;                    /* of a run, by that thread */

/* Does a piece. A long piece is done in parts, so that other workers see all the time that this one computes. */
static void do_piece(const struct call *call, int64_t rows, int64_t begin, int64_t end) {
    if (rows < MANY_ROWS) {
        pdserve_work(call, rows, begin, end);
        return;
    }
    const int64_t part = call->kind == BLOCKS ? 1 : 1 + MOMENT / (rows * (call->inputs + 1));
    for (; begin < end; begin += part) {
        pdserve_work(call, rows, begin, begin + part < end ? begin + part : end);
        pdserve_beat();
    }
}

/* Takes pieces of a call until there are none; returns 0 if another run has begun. */
static int take_pieces(struct call *call, int64_t rows, int64_t num_threads, uint64_t number) {
    for (;;) {
        uint64_t state = atomic_load_explicit(&call->taken, memory_order_acquire);
        do {
            if (state >> NUMBER_SHIFT != number)
                return 0;
            if ((state & COUNT_MASK) == (state >> COUNT_SHIFT & COUNT_MASK))
                return 1;
        } while (!atomic_compare_exchange_weak(&call->taken, &state, state + 1));
        const int64_t units = pdserve_units_of(call, rows), run = pdserve_run_length(units, num_threads);
        const int64_t begin = (int64_t)(state & COUNT_MASK) * run;
        do_piece(call, rows, begin, begin + run < units ? begin + run : units);
        atomic_fetch_add_explicit(&call->done, 1, memory_order_release);
    }
}

/* Waits for the pieces of a call that other threads have begun; returns 0 if another run has begun.
 *
 * It naps, because yielding puts a thread behind all others of its core. Measured twice, in turn, on a busy machine of
 * two cores: a program's step took 11.5 and 20.2 ms at the median with naps, 21.8 and 19.3 with yielding; at the 90th
 * percentile 14.0 and 26.6 with naps, 57.7 and 34.5 with yielding.
 *
 * A thread may wait in its piece for another rank, which is late or stopped (src/ranks.c). So naps grow: less than a
 * hundredth is added to the wait, and a wait of ten seconds takes some 5,000 naps in place of 130,000. */
static int is_done(struct call *call, uint64_t number) {
    const uint64_t pieces = atomic_load_explicit(&call->taken, memory_order_relaxed) >> COUNT_SHIFT & COUNT_MASK;
    for (int64_t spins = 0;; spins++) {
        uint64_t done = atomic_load_explicit(&call->done, memory_order_acquire);
        if (done >> NUMBER_SHIFT != number)
            return 0;
        if ((done & COUNT_MASK) == pieces)
            return 1;
        if (spins < SPINS)
            pause_a_little();
        else
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS + (spins - SPINS) * LONGER_NS}, NULL);
    }
}

static void take_part(struct call *call, int64_t rows, int64_t num_threads, uint64_t number) {
    while (take_pieces(call, rows, num_threads, number) && is_done(call, number)) {
        pdserve_beat();
        call++;
    }
}

static uint32_t next_number(struct helper *own, uint32_t seen) {
    for (int64_t spins = 0; spins < REST_SPINS; spins++) {
        uint32_t number = atomic_load_explicit(&own->number, memory_order_acquire);
        if (number != seen)
            return number;
        pause_a_little();
    }
    atomic_store(&own->sleeping, 1);
    while (atomic_load(&own->number) == seen)
        syscall(SYS_futex, &own->number, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_store(&own->sleeping, 0);
    return atomic_load_explicit(&own->number, memory_order_acquire);
}

static void *help(void *own) {
    const int64_t index = (struct helper *)own - helpers + 1;
    int64_t bound = -1;
    for (uint32_t seen = 0;;) {
        seen = next_number(own, seen);
        struct call *calls = atomic_load_explicit(&job.calls, memory_order_relaxed);
        const int64_t rows = atomic_load_explicit(&job.rows, memory_order_relaxed);
        const int64_t num_threads = atomic_load_explicit(&job.num_threads, memory_order_relaxed);
        const int64_t place = atomic_load_explicit(&job.place, memory_order_relaxed);
        if (place != bound)
            pdserve_bind(index + (bound = place));
        take_part(calls, rows, num_threads, seen);
    }
    return NULL;
}

static void start_helpers(int64_t num_threads) {
    while (num_helpers < num_threads - 1 && num_helpers < MOST_HELPERS) {
        pthread_t helper;
        if (pthread_create(&helper, NULL, help, &helpers[num_helpers]))
            return; /* fewer threads compute it */
        pthread_detach(helper);
        num_helpers++;
    }
}

/* Hands a run to as many helpers as it needs. The others sleep on: their processors may be another worker's. */
static void wake_helpers(uint32_t number, int64_t num_threads) {
    for (int64_t i = 0; i < num_helpers && i < num_threads - 1; i++) {
        atomic_store(&helpers[i].number, number);
        if (atomic_load(&helpers[i].sleeping))
            syscall(SYS_futex, &helpers[i].number, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
}

static uint32_t publish(struct call *calls, int64_t count, int64_t rows, int64_t num_threads, int64_t place) {
    last_number += 1 + (last_number == UINT32_MAX); /* 0 is no run's */
    const uint64_t number = last_number;
    for (int64_t i = 0; i < count; i++) {
        const int64_t units = pdserve_units_of(&calls[i], rows), run = pdserve_run_length(units, num_threads);
        const uint64_t pieces = (uint64_t)((units + run - 1) / run);
        atomic_store_explicit(&calls[i].done, number << NUMBER_SHIFT, memory_order_relaxed);
        atomic_store_explicit(&calls[i].taken, number << NUMBER_SHIFT | pieces << COUNT_SHIFT, memory_order_release);
    }
    atomic_store_explicit(&job.calls, calls, memory_order_relaxed);
    atomic_store_explicit(&job.rows, rows, memory_order_relaxed);
    atomic_store_explicit(&job.num_threads, num_threads, memory_order_relaxed);
    atomic_store_explicit(&job.place, place, memory_order_relaxed);
    wake_helpers(last_number, num_threads);
    return last_number;
}

/* Computes a program's calls with `num_threads` threads, one of them the caller, or with fewer beside other workers. If
 * another thread has the helpers, the caller computes alone. After the last call comes one of zeros, or of an earlier
 * run. The calls must exist as long as the process: a late helper looks at them. */
void pdserve_run_program(struct call *calls, int64_t count, int64_t rows, int64_t num_threads) {
    if (atomic_flag_test_and_set_explicit(&is_taken, memory_order_acquire)) {
        for (int64_t i = 0; i < count; i++)
            pdserve_work(&calls[i], rows, 0, pdserve_units_of(&calls[i], rows));
        return;
    }
    int64_t place;
    num_threads = pdserve_threads_beside_others(num_threads, &place);
    start_helpers(num_threads);
    take_part(calls, rows, num_threads, publish(calls, count, rows, num_threads, place));
    atomic_flag_clear_explicit(&is_taken, memory_order_release);
}
