/* The threads that solve one matrix together: started once per matrix, they share out the work by number and then meet
 * many times, between any two columns of the reduction. */
#ifndef TCHI_CPU_EIGH_TEAM_H
#define TCHI_CPU_EIGH_TEAM_H

#include <stdint.h>

#include "backends/cpu/runtime/work_team.h"

/* One thread of a team. A team of one never meets. */
typedef struct member {
    work_team *team;
    int thread, threads;
} member;

static inline void meet(const member *me)
{
    if (me->threads > 1) {
        team_meet(me->team);
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
