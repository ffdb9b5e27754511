/* A team of threads in one parallel region that distributes chunks of work and synchronizes many thousand times per
 * second. OpenMP's barriers spin for milliseconds: with one of two cores occupied by another program, the reduction of
 * a 512 by 512 matrix went from 2 to 200 ms, because the spinning thread occupied the core that the other one needed.
 * Here a thread spins for about the duration of a chunk and then sleeps.
 *
 * Every thread runs: */
#ifndef TCHI_CPU_WORK_TEAM_H
#define TCHI_CPU_WORK_TEAM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct work_team {
    int threads; /* set by one of them before the others use the team */
    atomic_int arrived;
    atomic_uint round;
    atomic_llong next;
    pthread_mutex_t mutex;
    pthread_cond_t next_round;
} work_team;

#define WORK_TEAM_INIT                                                                                                 \
    {                                                                                                                  \
        .threads = 1, .mutex = PTHREAD_MUTEX_INITIALIZER, .next_round = PTHREAD_COND_INITIALIZER                       \
    }

/* Pauses before sleeping: about 0.1 ms where a pause takes 140 cycles, less where it is shorter. */
enum { TEAM_SPINS = 1500 };

/* On aarch64 "yield" is a no-op on most processors; "isb", which drains the pipeline, comes close to a pause. */
static inline void team_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* The next chunk of this round, from 0, unbounded: the caller knows their number. */
static inline int64_t team_next_chunk(work_team *team)
{
    return atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
}

static inline void team_wait(work_team *team, unsigned round)
{
    for (int i = 0; i < TEAM_SPINS; i++) {
        if (atomic_load_explicit(&team->round, memory_order_acquire) != round) {
            return;
        }
        team_pause();
    }
    pthread_mutex_lock(&team->mutex);
    while (atomic_load_explicit(&team->round, memory_order_acquire) == round) {
        pthread_cond_wait(&team->next_round, &team->mutex);
    }
    pthread_mutex_unlock(&team->mutex);
}

/* Releases the waiting threads and restarts the chunk counter. */
static inline void team_release(work_team *team)
{
    atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    if (team->threads > 1) {
        pthread_mutex_lock(&team->mutex);
        atomic_fetch_add_explicit(&team->round, 1, memory_order_release);
        pthread_cond_broadcast(&team->next_round);
        pthread_mutex_unlock(&team->mutex);
    }
}

/* Returns 1 to the last thread that arrives, which alone may then work and must call team_release; the others return 0
 * after that. */
static inline int team_gather(work_team *team)
{
    const unsigned round = atomic_load_explicit(&team->round, memory_order_acquire);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) + 1 == team->threads) {
        return 1;
    }
    team_wait(team, round);
    return 0;
}

static inline void team_barrier(work_team *team)
{
    if (team_gather(team)) {
        team_release(team);
    }
}

#endif
