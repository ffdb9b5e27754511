/* Calls that process samples in chunks: the number that fits, memory for all chunks before the first write, and the
 * loop. */
#ifndef TCHI_GRAD_WALK_H
#define TCHI_GRAD_WALK_H

#include <stdbool.h>

#include "core/context.h"
#include "core/tensor.h"

typedef struct tchi_walk {
    int64_t samples;
    int64_t chunk;        /* samples at a time; 0: as many as fit */
    int64_t positions;    /* of a sample */
    int64_t bytes_beside; /* additional scratch; both choose `chunk` */
    bool small;           /* samples are small: measure the layout of many */
    /* Lays out samples [first, first + count). Fixed offsets come first. */
    void (*layout)(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count);
    /* Called once, after all memory is reserved, with the first chunk laid out; may be NULL. */
    tch_status (*begin)(tch_context *context, void *call);
    /* One chunk; called once with a count of 0 if there are no samples. */
    tch_status (*part)(tch_context *context, void *call, int64_t first, int64_t count);
} tchi_walk;

/* All the scratch that it will reserve. */
int64_t tchi_walk_bytes(tch_context *context, const tchi_walk *walk, void *call);

tch_status tchi_walk_samples(tch_context *context, const tchi_walk *walk, void *call);

/* Scratch that a call may use: the context's limit, at most the useful size. */
int64_t tchi_scratch_budget(const tch_context *context);

/* Reserves all memory of a call before its first write: later reserves of less cannot fail. */
tch_status tchi_reserve_first(tch_context *context, int64_t bytes);

/* Clears the per-sample results, unless accumulating. */
tch_status tchi_clear_numbers(tch_context *context, int32_t accumulate, double *numbers, int64_t samples);

/* Samples per chunk with `bytes_each` of scratch on top of `bytes_fixed`: as many as fit the context's limit and the
 * useful size, with at most INT32_MAX rows in a tall matrix; at least one. */
int64_t tchi_chunk_samples(const tch_context *context, int64_t samples, int64_t positions, int64_t bytes_each,
                           int64_t bytes_fixed);

#endif
