/* Contexts and their workspace. */
#include "context.h"

#include "allocator.h"
#include "check.h"
#include "list.h"
#include "registry.h"
#include "status.h"

#include <torchium/memory.h>

#define ARENA_ALIGNMENT 256

tch_status tch_context_create(const char *device, tch_context **context)
{
    if (context == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_context_create: context is NULL");
    }
    *context = NULL;
    tch_device where;
    TCHI_TRY(tch_device_parse(device, &where));
    const tch_backend *backend = tchi_registry_find(where.type);
    if (backend == NULL) {
        return TCH_ERR_UNAVAILABLE;
    }
    int32_t count = tch_device_count((tch_device_type)where.type);
    if (where.index >= count) {
        return tchi_fail(TCH_ERR_UNAVAILABLE, "tch_context_create: device %s was requested, but there %s only %d",
                         device, count == 1 ? "is" : "are", count);
    }
    tch_context *c;
    TCHI_TRY(tchi_host_take(sizeof *c, "a context", &c));
    *c = (tch_context){.backend = backend};
    tch_status status = tchi_pool_create(backend, where.index, &c->pool);
    if (status != TCH_OK) {
        tchi_host_release(c, sizeof *c);
        return status;
    }
    c->state = tchi_pool_state(c->pool);
    *context = c;
    return TCH_OK;
}

void tch_context_destroy(tch_context *context)
{
    if (context == NULL) {
        return;
    }
    context->backend->device->synchronize(context->state);
    tchi_pool_free(context->pool, context->workspace);
    tchi_pool_drop(context->pool);
    tchi_host_release(context, sizeof *context);
}

tch_device tch_context_device(const tch_context *context)
{
    return context == NULL ? (tch_device){0, 0} : tchi_pool_device(context->pool);
}

tch_status tch_context_set_stream(tch_context *context, void *stream)
{
    TCHI_ENTER(context, "tch_context_set_stream");
    return context->backend->device->stream(context->state, 1, &stream);
}

void *tch_context_get_stream(const tch_context *context)
{
    void *stream = NULL;
    if (context != NULL) {
        (void)context->backend->device->stream(context->state, 0, &stream);
    }
    return stream;
}

tch_status tch_context_synchronize(tch_context *context)
{
    TCHI_ENTER(context, "tch_context_synchronize");
    return context->backend->device->synchronize(context->state);
}

tch_status tch_context_set_workspace_limit(tch_context *context, int64_t bytes)
{
    TCHI_ENTER(context, "tch_context_set_workspace_limit");
    if (bytes < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_context_set_workspace_limit: bytes is %lld, expected 0 (no limit) or more",
                         (long long)bytes);
    }
    context->workspace_limit = bytes;
    if (bytes > 0 && context->workspace_bytes > bytes) {
        tchi_pool_free(context->pool, context->workspace);
        context->workspace = NULL;
        context->workspace_bytes = 0;
    }
    return TCH_OK;
}

int64_t tch_context_get_workspace_limit(const tch_context *context)
{
    return context == NULL ? 0 : context->workspace_limit;
}

/* Without a range: it would be opened with one hook and closed with another. */
tch_status tch_context_set_range_hook(tch_context *context, void (*push)(void *user, const char *name),
                                      void (*pop)(void *user), void *user)
{
    if (context == NULL || (push == NULL) != (pop == NULL)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_context_set_range_hook: context is %s, push is %s and pop is %s; expected a context and "
                         "both functions or neither",
                         context == NULL ? "NULL" : "set", push == NULL ? "NULL" : "set", pop == NULL ? "NULL" : "set");
    }
    context->range_push = push;
    context->range_pop = pop;
    context->range_user = user;
    return TCH_OK;
}

/* --- memory.h --------------------------------------------------------------------------------------------------- */

tch_status tch_memory_get_info(tch_context *context, tch_memory_info *info)
{
    TCHI_ENTER(context, "tch_memory_get_info");
    if (info == NULL || info->struct_size != sizeof(tch_memory_info)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_memory_get_info: info must point to a struct set to TCH_MEMORY_INFO_INIT");
    }
    tch_memory_info figures = TCH_MEMORY_INFO_INIT;
    TCHI_TRY(context->backend->device->memory_info(context->state, &figures.total, &figures.free));
    tchi_pool_figures(context->pool, &figures);
    *info = figures;
    return TCH_OK;
}

tch_status tch_memory_alloc(tch_context *context, int64_t bytes, void **pointer)
{
    TCHI_ENTER(context, "tch_memory_alloc");
    if (pointer == NULL || bytes < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_memory_alloc: pointer is %s and bytes is %lld",
                         pointer == NULL ? "NULL" : "set", (long long)bytes);
    }
    return tchi_pool_allocate(context->pool, bytes, pointer);
}

tch_status tch_memory_free(tch_context *context, void *pointer)
{
    TCHI_ENTER(context, "tch_memory_free");
    if (pointer != NULL && pointer == context->workspace) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_memory_free: pointer %p is the context's workspace", pointer);
    }
    return tchi_pool_free(context->pool, pointer);
}

tch_status tch_memory_trim(tch_context *context, int64_t keep)
{
    TCHI_ENTER(context, "tch_memory_trim");
    if (keep < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_memory_trim: keep is %lld, expected 0 or more",
                         (long long)keep);
    }
    TCHI_TRY(context->backend->device->synchronize(context->state));
    tchi_pool_free(context->pool, context->workspace);
    context->workspace = NULL;
    context->workspace_bytes = 0;
    tchi_pool_trim(context->pool, keep);
    return TCH_OK;
}

tch_status tch_memory_reset_peak(tch_context *context)
{
    TCHI_ENTER(context, "tch_memory_reset_peak");
    tchi_pool_reset_peak(context->pool);
    return TCH_OK;
}

/* --- workspace -------------------------------------------------------------------------------------------------- */

void *tchi_arena_take(tchi_arena *arena, int64_t bytes)
{
    void *chunk = arena->base == NULL ? NULL : arena->base + arena->used;
    int64_t most = INT64_MAX / 2; /* sizes beyond this stay there, and fail when they are reserved */
    bytes = bytes < 0 || bytes > most ? most : (bytes + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
    arena->used = arena->used > most - bytes ? most : arena->used + bytes;
    return chunk;
}

tch_status tchi_arena_reserve(tch_context *context, tchi_arena *arena)
{
    if (arena->used > INT64_MAX / 4) {
        return tchi_fail(TCH_ERR_OUT_OF_MEMORY, "this call needs more scratch memory than 64 bits can count");
    }
    int64_t bytes = tchi_pool_block_size(arena->used);
    if (context->workspace_limit > 0 && bytes > context->workspace_limit) {
        return tchi_fail(TCH_ERR_OUT_OF_MEMORY,
                         "this call needs %lld bytes of scratch, the context's workspace limit is %lld; raise it with "
                         "tch_context_set_workspace_limit",
                         (long long)bytes, (long long)context->workspace_limit);
    }
    if (bytes > context->workspace_bytes) {
        tchi_pool_free(context->pool, context->workspace);
        context->workspace = NULL;
        context->workspace_bytes = 0;
        TCHI_TRY(tchi_pool_allocate(context->pool, bytes, &context->workspace));
        context->workspace_bytes = bytes;
    }
    *arena = (tchi_arena){.base = context->workspace};
    return TCH_OK;
}

int64_t tchi_arena_fit(const tch_context *context, int64_t batch, int64_t bytes_each, int64_t bytes_fixed)
{
    if (context->workspace_limit == 0 || bytes_each <= 0) {
        return batch;
    }
    /* The pool rounds a block up by at most an eighth of its size. */
    int64_t usable = context->workspace_limit / 9 * 8;
    int64_t fit = (usable - bytes_fixed) / bytes_each;
    return fit < 1 ? 1 : fit < batch ? fit : batch;
}
