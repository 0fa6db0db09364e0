/* Runs a program in a team of threads that waits for nobody who is not at work.
 *
 * Others compute on the same cores: another worker, a router, clients. A thread that the kernel does not run, because
 * its core is taken, would hold up all others at every barrier of a step. So there are none. Whoever is there takes the
 * next pieces of a call; a call is over when its pieces are done, whoever did them; and a thread that comes late finds
 * its way to the call that is under way. Others wait only for pieces that are begun.
 *
 * A program's calls carry the number of the run, so that a thread that is still at an earlier run takes nothing. After
 * the last call lies one of no run, or of an earlier one: there everybody stops. */

#define _GNU_SOURCE

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "calls.h"
#include "seats.h"

#define MOST_HELPERS 255
#define SPINS 2000      /* some ten microseconds; then the core is left to others */
#define NAP_NS 20000    /* then it looks again: see is_done */
#define REST_SPINS 4000 /* between runs, before a helper sleeps */
#define MANY_ROWS 64    /* whose pieces take long */

/* taken: the run's number, the count of pieces, and of those taken; done: the run's number and a count. */
#define NUMBER_SHIFT 16
#define COUNT_SHIFT 8
#define COUNT_MASK 255

static struct {
    struct call *_Atomic calls;
    _Atomic int64_t rows, num_threads;
    _Atomic uint32_t number; /* of the run; helpers sleep on it */
    _Atomic uint32_t sleeping;
} job;

static atomic_flag is_taken = ATOMIC_FLAG_INIT; /* the helpers, by a thread that runs a program */
static int64_t num_helpers;                     /* only that thread starts more */

static void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
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
        pdserve_work(call, rows, begin, begin + run < units ? begin + run : units);
        atomic_fetch_add_explicit(&call->done, 1, memory_order_release);
        if (rows >= MANY_ROWS)
            pdserve_beat();
    }
}

/* Waits for what others have begun of a call; returns 0 if another run has begun.
 *
 * In naps, not by yielding, which puts a thread behind all others of its core. In turn on a busy machine of two cores,
 * steps of programs took at the median 11.5, 20.2 ms in place of 21.8, 19.3, and at the 90th percentile 14.0, 26.6 in
 * place of 57.7, 34.5. */
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
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    }
}

static void take_part(struct call *call, int64_t rows, int64_t num_threads, uint64_t number) {
    while (take_pieces(call, rows, num_threads, number) && is_done(call, number)) {
        pdserve_beat();
        call++;
    }
}

static uint32_t next_number(uint32_t seen) {
    for (int64_t spins = 0; spins < REST_SPINS; spins++) {
        uint32_t number = atomic_load_explicit(&job.number, memory_order_acquire);
        if (number != seen)
            return number;
        pause_a_little();
    }
    atomic_fetch_add(&job.sleeping, 1);
    while (atomic_load(&job.number) == seen)
        syscall(SYS_futex, &job.number, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&job.sleeping, 1);
    return atomic_load_explicit(&job.number, memory_order_acquire);
}

static void *help(void *index) {
    for (uint32_t seen = 0;;) {
        seen = next_number(seen);
        struct call *calls = atomic_load_explicit(&job.calls, memory_order_relaxed);
        const int64_t rows = atomic_load_explicit(&job.rows, memory_order_relaxed);
        const int64_t num_threads = atomic_load_explicit(&job.num_threads, memory_order_relaxed);
        if ((intptr_t)index < num_threads)
            take_part(calls, rows, num_threads, seen);
    }
    return NULL;
}

/* Where the calling thread is bound to one core, binds a helper to the next of the process's cores. */
static void bind(pthread_t helper, int64_t number) {
    cpu_set_t mine, all, one;
    if (sched_getaffinity(0, sizeof mine, &mine) || sched_getaffinity(getpid(), sizeof all, &all))
        return;
    if (CPU_COUNT(&mine) != 1) /* nobody has bound it */
        return;
    int here = 0;
    while (!CPU_ISSET(here, &mine))
        here++;
    for (int core = here; number > 0;) {
        core = (core + 1) % CPU_SETSIZE;
        if (CPU_ISSET(core, &all) && --number == 0) {
            CPU_ZERO(&one);
            CPU_SET(core, &one);
            pthread_setaffinity_np(helper, sizeof one, &one);
        }
    }
}

static void start_helpers(int64_t num_threads) {
    while (num_helpers < num_threads - 1 && num_helpers < MOST_HELPERS) {
        pthread_t helper;
        if (pthread_create(&helper, NULL, help, (void *)(intptr_t)(num_helpers + 1)))
            return; /* fewer threads compute it */
        pthread_detach(helper);
        bind(helper, ++num_helpers);
    }
}

static uint32_t publish(struct call *calls, int64_t count, int64_t rows, int64_t num_threads) {
    uint64_t number = (uint32_t)(atomic_load_explicit(&job.number, memory_order_relaxed) + 1);
    number += !number; /* 0 is no run's */
    for (int64_t i = 0; i < count; i++) {
        const int64_t units = pdserve_units_of(&calls[i], rows), run = pdserve_run_length(units, num_threads);
        const uint64_t pieces = (uint64_t)((units + run - 1) / run);
        atomic_store_explicit(&calls[i].done, number << NUMBER_SHIFT, memory_order_relaxed);
        atomic_store_explicit(&calls[i].taken, number << NUMBER_SHIFT | pieces << COUNT_SHIFT, memory_order_release);
    }
    atomic_store_explicit(&job.calls, calls, memory_order_relaxed);
    atomic_store_explicit(&job.rows, rows, memory_order_relaxed);
    atomic_store_explicit(&job.num_threads, num_threads, memory_order_relaxed);
    atomic_store(&job.number, (uint32_t)number);
    if (atomic_load(&job.sleeping))
        syscall(SYS_futex, &job.number, FUTEX_WAKE_PRIVATE, MOST_HELPERS, NULL, NULL, 0);
    return (uint32_t)number;
}

/* Computes a program's calls with `num_threads` threads, one of which calls this, or fewer beside other workers; where
 * another thread has the helpers, the caller computes alone. Behind the last call lies one of zeros, or of an earlier run. The calls have to stay for as
 * long as the process: a helper that comes late looks at them. */
void pdserve_run_program(struct call *calls, int64_t count, int64_t rows, int64_t num_threads) {
    if (atomic_flag_test_and_set_explicit(&is_taken, memory_order_acquire)) {
        for (int64_t i = 0; i < count; i++)
            pdserve_work(&calls[i], rows, 0, pdserve_units_of(&calls[i], rows));
        return;
    }
    num_threads = pdserve_threads_beside_others(num_threads);
    start_helpers(num_threads);
    take_part(calls, rows, num_threads, publish(calls, count, rows, num_threads));
    atomic_flag_clear_explicit(&is_taken, memory_order_release);
}
