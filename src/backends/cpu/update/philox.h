/* The random numbers of stochastic rounding: Philox-4x32-10 of Salmon, Moraes, Dror and Shaw ("Parallel random numbers:
 * as easy as 1, 2, 3", 2011), a counter-based generator. torchium/backend.h specifies counter and key of an element,
 * which must not change: a GPU draws the same bits. */
#ifndef TCHI_CPU_UPDATES_PHILOX_H
#define TCHI_CPU_UPDATES_PHILOX_H

#include <stdint.h>

#define PHILOX_LANES 16 /* counters processed together: the widest vector */

/* Word k of the counter of lane i is word[k][i]. */
typedef struct philox_counters {
    uint32_t word[4][PHILOX_LANES];
} philox_counters;

static inline void philox_round(philox_counters *c, uint32_t key0, uint32_t key1)
{
#pragma omp simd
    for (int i = 0; i < PHILOX_LANES; i++) {
        uint64_t first = (uint64_t)0xD2511F53u * c->word[0][i];
        uint64_t second = (uint64_t)0xCD9E8D57u * c->word[2][i];
        c->word[0][i] = (uint32_t)(second >> 32) ^ c->word[1][i] ^ key0;
        c->word[1][i] = (uint32_t)second;
        c->word[2][i] = (uint32_t)(first >> 32) ^ c->word[3][i] ^ key1;
        c->word[3][i] = (uint32_t)first;
    }
}

static inline void philox_encipher(philox_counters *c, uint64_t key)
{
    uint32_t key0 = (uint32_t)key;
    uint32_t key1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        philox_round(c, key0, key1);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

#endif
