#include "walk.h"

#include "core/arith.h"
#include "core/status.h"
#include "linalg/algebra.h"

/* The size of a chunk's scratch even without a limit: enough to fill a device, and far below the activations of a batch
 * that would exceed it. */
#define WORTH_OF_SCRATCH ((int64_t)128 << 20)

static int64_t layout_bytes(tch_context *context, const tchi_walk *walk, void *call, int64_t count)
{
    tchi_arena arena = {0};
    walk->layout(call, &arena, context, 0, count);
    return arena.used;
}

static int64_t choose_chunk(tch_context *context, const tchi_walk *walk, void *call)
{
    if (walk->chunk > 0) {
        return walk->chunk;
    }
    if (walk->small) {
        enum { MANY = 64 }; /* the parts of an arena are rounded up */
        int64_t one = layout_bytes(context, walk, call, 1);
        int64_t each = tchi_ceil_div(layout_bytes(context, walk, call, 1 + MANY) - one, MANY);
        return tchi_chunk_samples(context, walk->samples, walk->positions, each, one);
    }
    int64_t none = layout_bytes(context, walk, call, 0);
    int64_t one = layout_bytes(context, walk, call, 1);
    return tchi_chunk_samples(context, walk->samples, walk->positions, one - none, none + walk->bytes_beside);
}

/* The last chunk is smaller, but may need more scratch: a device with little work splits it further. */
int64_t tchi_walk_bytes(tch_context *context, const tchi_walk *walk, void *call)
{
    int64_t chunk = choose_chunk(context, walk, call);
    return tchi_max(layout_bytes(context, walk, call, tchi_min(chunk, walk->samples)),
                    layout_bytes(context, walk, call, walk->samples % chunk));
}

tch_status tchi_walk_samples(tch_context *context, const tchi_walk *walk, void *call)
{
    int64_t chunk = choose_chunk(context, walk, call);
    tchi_arena arena = {.used = tchi_walk_bytes(context, walk, call)};
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    int64_t first = 0;
    do {
        int64_t count = tchi_min(chunk, walk->samples - first);
        tchi_arena here = {.base = arena.base};
        walk->layout(call, &here, context, first, count);
        if (first == 0 && walk->begin != NULL) {
            TCHI_TRY(walk->begin(context, call));
        }
        TCHI_TRY(walk->part(context, call, first, count));
        first += chunk;
    } while (first < walk->samples);
    return TCH_OK;
}

int64_t tchi_scratch_budget(const tch_context *context)
{
    return tchi_arena_fit(context, WORTH_OF_SCRATCH, 1, 0);
}

tch_status tchi_reserve_first(tch_context *context, int64_t bytes)
{
    tchi_arena arena = {.used = bytes};
    return tchi_arena_reserve(context, &arena);
}

tch_status tchi_clear_numbers(tch_context *context, int32_t accumulate, double *numbers, int64_t samples)
{
    return accumulate || samples == 0
               ? TCH_OK
               : context->backend->device->zero_bytes(context->state, numbers, samples * (int64_t)sizeof *numbers);
}

int64_t tchi_chunk_samples(const tch_context *context, int64_t samples, int64_t positions, int64_t bytes_each,
                           int64_t bytes_fixed)
{
    int64_t fit = tchi_arena_fit(context, samples, bytes_each, bytes_fixed);
    if (bytes_each > 0 && fit > WORTH_OF_SCRATCH / bytes_each) {
        fit = WORTH_OF_SCRATCH / bytes_each;
    }
    if (positions > 0 && fit > TCHI_MOST_SIZE / positions) {
        fit = TCHI_MOST_SIZE / positions;
    }
    return fit < 1 ? 1 : fit;
}
