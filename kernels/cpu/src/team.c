/* Runs a program in a team of threads that waits for nobody who is not at work.
 *
 * Others compute on the same cores: another worker, a router, clients. A thread that the kernel does not run, because
 * its core is taken, would hold up all others at every barrier of a step. So there are none. Whoever is there takes the
 * next pieces of a call; a call is over when its pieces are done, whoever did them; and a thread that comes late finds
 * its way to the call that is under way. Others wait only for pieces that are begun.
 *
 * A program's calls carry the number of the run, so that a thread that is still at an earlier run takes nothing. */

#define _GNU_SOURCE

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "calls.h"

#define MOST_HELPERS 255
#define SPINS 2000       /* some ten microseconds; then the core is left to others */
#define NAP_NS 20000      /* then it looks again */
#define REST_SPINS 4000  /* between runs, before a helper sleeps */

/* taken: the run's number, the count of pieces, and of those taken; done: the run's number and a count. */
#define NUMBER_SHIFT 16
#define COUNT_SHIFT 8
#define COUNT_MASK 255

static struct {
    struct call *_Atomic calls;
    _Atomic int64_t count, rows;
    _Atomic uint32_t number; /* of the run; helpers sleep on it */
    _Atomic uint32_t sleeping;
} job;

static int64_t num_helpers;

static void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t pieces_of(int64_t units) {
    int64_t run = pdserve_run_length(units);
    return (units + run - 1) / run;
}

/* Takes pieces of a call until there are none; returns 0 if another run has begun. */
static int take_pieces(struct call *call, int64_t rows, uint64_t number) {
    for (;;) {
        uint64_t state = atomic_load_explicit(&call->taken, memory_order_acquire);
        do {
            if (state >> NUMBER_SHIFT != number)
                return 0;
            if ((state & COUNT_MASK) == (state >> COUNT_SHIFT & COUNT_MASK))
                return 1;
        } while (!atomic_compare_exchange_weak(&call->taken, &state, state + 1));
        const int64_t units = pdserve_units_of(call, rows), run = pdserve_run_length(units);
        const int64_t begin = (int64_t)(state & COUNT_MASK) * run;
        pdserve_work(call, rows, begin, begin + run < units ? begin + run : units);
        atomic_fetch_add_explicit(&call->done, 1, memory_order_release);
    }
}

/* Waits for what others have begun of a call; returns 0 if another run has begun. */
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
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL); /* yielding would put it behind all others */
    }
}

static void take_part(struct call *calls, int64_t count, int64_t rows, uint64_t number) {
    for (int64_t i = 0; i < count; i++)
        if (!take_pieces(&calls[i], rows, number) || !is_done(&calls[i], number))
            return;
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

static void *help(void *seen_first) {
    for (uint32_t seen = (uint32_t)(uintptr_t)seen_first;;) {
        seen = next_number(seen);
        struct call *calls = atomic_load_explicit(&job.calls, memory_order_relaxed);
        int64_t count = atomic_load_explicit(&job.count, memory_order_relaxed);
        take_part(calls, count, atomic_load_explicit(&job.rows, memory_order_relaxed), seen);
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
    const uint32_t seen = atomic_load(&job.number);
    while (num_helpers < num_threads - 1 && num_helpers < MOST_HELPERS) {
        pthread_t helper;
        if (pthread_create(&helper, NULL, help, (void *)(uintptr_t)seen))
            return; /* fewer threads compute it */
        pthread_detach(helper);
        bind(helper, ++num_helpers);
    }
}

/* Computes a program's calls with `num_threads` threads, one of which calls this; one thread at a time may. The calls
 * have to stay for as long as the process: a helper that comes late looks at them. */
void pdserve_run_program(struct call *calls, int64_t count, int64_t rows, int64_t num_threads) {
    start_helpers(num_threads);
    const uint64_t number = (uint32_t)(atomic_load_explicit(&job.number, memory_order_relaxed) + 1);
    for (int64_t i = 0; i < count; i++) {
        uint64_t pieces = (uint64_t)pieces_of(pdserve_units_of(&calls[i], rows));
        atomic_store_explicit(&calls[i].done, number << NUMBER_SHIFT, memory_order_relaxed);
        atomic_store_explicit(&calls[i].taken, number << NUMBER_SHIFT | pieces << COUNT_SHIFT, memory_order_release);
    }
    atomic_store_explicit(&job.calls, calls, memory_order_relaxed);
    atomic_store_explicit(&job.count, count, memory_order_relaxed);
    atomic_store_explicit(&job.rows, rows, memory_order_relaxed);
    atomic_store(&job.number, (uint32_t)number);
    if (atomic_load(&job.sleeping))
        syscall(SYS_futex, &job.number, FUTEX_WAKE_PRIVATE, MOST_HELPERS, NULL, NULL, 0);
    take_part(calls, count, rows, number);
}
