/* The threads that solve one matrix together. They are started once per matrix and then meet many times, hence a
 * barrier of our own: OpenMP's makes a system call each time, about as long as the work between two meetings. */
#ifndef TCHI_CPU_EIGH_TEAM_H
#define TCHI_CPU_EIGH_TEAM_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct meeting {
    atomic_int arrived, round;
} meeting;

/* One thread of a team. A team of one never meets. */
typedef struct member {
    meeting *m;
    int thread, threads;
} member;

/* Looks at the counter before giving way: some tens of microseconds. A thread that has not come by then has probably
 * lost its processor, perhaps to us. */
enum { MEETING_SPINS = 20000 };

static inline void meet(const member *me)
{
    if (me->threads == 1) {
        return;
    }
    int round = atomic_load_explicit(&me->m->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&me->m->arrived, 1, memory_order_acq_rel) == me->threads - 1) {
        atomic_store_explicit(&me->m->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&me->m->round, round + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&me->m->round, memory_order_acquire) == round; spins++) {
        if (spins >= MEETING_SPINS) {
            spins = MEETING_SPINS;
            sched_yield();
        }
    }
}

/* This member's part of count things, in whole units. */
static inline void share(const member *me, int64_t count, int64_t unit, int64_t *begin, int64_t *end)
{
    int64_t units = (count + unit - 1) / unit;
    *begin = units * me->thread / me->threads * unit;
    *end = units * (me->thread + 1) / me->threads * unit;
    *begin = *begin < count ? *begin : count;
    *end = *end < count ? *end : count;
}

#endif
