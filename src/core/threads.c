/* The thread count, by default OpenMP's, which respects OMP_NUM_THREADS and the process's cores; and fork handlers. */
#include "threads.h"

#include <omp.h>
#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#include <torchium/device.h>

#include "status.h"

#define MOST_THREADS 1024

static atomic_int chosen; /* 0: the default */

int32_t tchi_num_threads(void)
{
    int count = atomic_load(&chosen);
    return count > 0 ? count : omp_get_max_threads();
}

int32_t tch_get_num_threads(void)
{
    return tchi_num_threads();
}

tch_status tch_set_num_threads(int32_t count)
{
    if (count < 1 || count > MOST_THREADS) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_set_num_threads: count is %d, expected 1 to %d", count,
                         MOST_THREADS);
    }
    atomic_store(&chosen, count);
    return TCH_OK;
}

/* --- forks ------------------------------------------------------------------------------------------------------- */

/* Opening OpenBLAS takes 10 milliseconds, GPU libraries seconds. The wait is bounded because glibc 2.28 to 2.36 without
 * the fix of bug 24595 hold a lock during fork handlers that OpenBLAS needs while it is opened. */
#define LONGEST_WAIT_S 30

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int depth; /* of this thread's holds: the first locks, the last unlocks */
static _Thread_local bool held; /* by the fork that is under way */

static void before_fork(void)
{
    struct timespec until = {0};
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += LONGEST_WAIT_S;
    held = depth == 0 && pthread_mutex_timedlock(&opening, &until) == 0;
}

static void after_fork(void)
{
    if (held) {
        pthread_mutex_unlock(&opening);
    }
}

/* After a timeout the thread that would unlock it does not exist in the child. */
static void after_fork_in_child(void)
{
    if (!held && depth == 0) {
        pthread_mutex_init(&opening, NULL);
    }
    after_fork();
}

/* At load time: a fork in progress does not run handlers registered later. */
__attribute__((constructor)) static void watch_forks(void)
{
    (void)pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

void tchi_fork_hold(void)
{
    if (depth++ == 0) {
        pthread_mutex_lock(&opening);
    }
}

void tchi_fork_release(void)
{
    if (--depth == 0) {
        pthread_mutex_unlock(&opening);
    }
}

void tchi_once(atomic_bool *done, void (*body)(void))
{
    if (atomic_load_explicit(done, memory_order_acquire)) {
        return;
    }
    tchi_fork_hold();
    if (!atomic_load_explicit(done, memory_order_relaxed)) {
        body();
        atomic_store_explicit(done, true, memory_order_release);
    }
    tchi_fork_release();
}
