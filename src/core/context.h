/* Internals of a context, and the workspace for scratch. */
#ifndef TCHI_CONTEXT_H
#define TCHI_CONTEXT_H

#include <torchium/backend.h>
#include <torchium/context.h>

#include "pool.h"

struct tch_context {
    const tch_backend *backend; /* the operations table */
    void *state;                /* its first argument */
    tchi_pool *pool;
    void *workspace; /* grows to the largest scratch asked for, and is reused */
    int64_t workspace_bytes;
    int64_t workspace_limit;
    void (*range_push)(void *user, const char *name); /* the caller's, or NULL */
    void (*range_pop)(void *user);
    void *range_user;
};

/* Scratch is laid out by the same code twice: first without memory, to measure it, then for real.
 *
 *     tchi_arena arena = {0};
 *     layout(&buffers, &arena);                         // every pointer NULL, arena.used is the size
 *     TCHI_TRY(tchi_arena_reserve(context, &arena));
 *     layout(&buffers, &arena);                         // the same again, now with addresses
 *
 * The workspace belongs to one public call at a time; its functions allocate from its arena. */
typedef struct tchi_arena {
    char *base;
    int64_t used;
} tchi_arena;

/* `bytes` of scratch, aligned to 256; NULL while measuring. */
void *tchi_arena_take(tchi_arena *arena, int64_t bytes);

/* Grows the workspace to the measured size and points the arena at its start. Fails, before any write, if the context's
 * limit or device memory is too small. */
tch_status tchi_arena_reserve(tch_context *context, tchi_arena *arena);

/* The number of matrices of a batch that fit in the workspace at once, `bytes_each` on top of `bytes_fixed`: at least
 * one, all if there is no limit. */
int64_t tchi_arena_fit(const tch_context *context, int64_t batch, int64_t bytes_each, int64_t bytes_fixed);

#endif
