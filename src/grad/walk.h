/* Calls that go through their samples a chunk at a time: how many fit, memory for all chunks before the first write,
 * and the loop. */
#ifndef TCHI_GRAD_WALK_H
#define TCHI_GRAD_WALK_H

#include <stdbool.h>

#include "core/context.h"
#include "core/tensor.h"

typedef struct tchi_walk {
    int64_t samples;
    int64_t chunk;        /* samples at a time; 0: as many as fit beside what the layout of no sample takes */
    int64_t positions;    /* of a sample, and */
    int64_t bytes_beside; /* scratch that is wanted on top, for that choice */
    bool small;           /* samples so small that what one takes shows only in the layout of many */
    /* Places what the call needs for samples [first, first + count). What keeps its place comes first. */
    void (*layout)(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count);
    /* Once all memory is there, with the first chunk laid out; may be NULL. */
    tch_status (*begin)(tch_context *context, void *call);
    /* One chunk; called once with a count of 0 where there are no samples. */
    tch_status (*part)(tch_context *context, void *call, int64_t first, int64_t count);
} tchi_walk;

/* All the scratch that it will reserve. */
int64_t tchi_walk_bytes(tch_context *context, const tchi_walk *walk, void *call);

tch_status tchi_walk_samples(tch_context *context, const tchi_walk *walk, void *call);

/* Scratch that a call may take: the context's limit, and not more than scratch is worth. */
int64_t tchi_scratch_budget(const tch_context *context);

/* Makes sure of all the memory of a call before its first write: reserving less later on cannot fail. */
tch_status tchi_reserve_first(tch_context *context, int64_t bytes);

/* Numbers per sample that a call adds to start from 0, unless the caller accumulates. */
tch_status tchi_clear_numbers(tch_context *context, int32_t accumulate, double *numbers, int64_t samples);

/* Samples to do at once when each takes `bytes_each` of scratch on top of `bytes_fixed`: as many as fit the context's
 * limit and do not take more than scratch is worth, with at most INT32_MAX rows in a tall matrix; at least one. */
int64_t tchi_chunk_samples(const tch_context *context, int64_t samples, int64_t positions, int64_t bytes_each,
                           int64_t bytes_fixed);

#endif
