/* Memory: usage, a context's pool, and the host allocator. */
#ifndef TORCHIUM_MEMORY_H
#define TORCHIUM_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/context.h>
#include <torchium/export.h>
#include <torchium/status.h>

typedef struct tch_memory_info {
    size_t struct_size; /* set by TCH_MEMORY_INFO_INIT */
    int64_t total;      /* the device's memory, in bytes */
    int64_t free;       /* of it, free */
    int64_t allocated;  /* allocated from this context's pool */
    int64_t reserved;   /* held by the pool: allocated and cached */
    int64_t peak;       /* the highest `allocated` since creation or tch_memory_reset_peak */
    int64_t requests;   /* allocations from the pool */
    int64_t misses;     /* of these, served by the device: constant in a steady state */
} tch_memory_info;
#define TCH_MEMORY_INFO_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_memory_info), 0, 0, 0, 0, 0, 0, 0                                                                   \
    }

/* `allocate` returns memory aligned to `alignment` (a power of two), or NULL. */
typedef struct tch_host_allocator {
    size_t struct_size; /* sizeof(tch_host_allocator) */
    void *(*allocate)(void *user, size_t bytes, size_t alignment);
    void (*release)(void *user, void *pointer, size_t bytes);
    void *user;
} tch_host_allocator;

TCH_BEGIN_DECLS

TCH_API tch_status tch_memory_get_info(tch_context *context, tch_memory_info *info);

/* Memory of the context's device from its pool, aligned to at least 64 bytes, contents undefined. 0 bytes give NULL. */
TCH_API tch_status tch_memory_alloc(tch_context *context, int64_t bytes, void **pointer);

/* Returns memory to the pool, which may reuse it at once, in the order of the context's stream; work on other streams
 * must have finished with it. NULL is allowed; a pointer from elsewhere is an error. */
TCH_API tch_status tch_memory_free(tch_context *context, void *pointer);

/* Synchronizes, then returns cached memory, the workspace included, to the device until at most `keep` bytes are
 * cached. A GPU's memory is free after the next synchronization. */
TCH_API tch_status tch_memory_trim(tch_context *context, int64_t keep);

/* Resets `peak` to the memory allocated now. */
TCH_API tch_status tch_memory_reset_peak(tch_context *context);

/* Replaces the allocator of all host memory of the library; NULL restores the default. Only while no context and no
 * tensor exists. */
TCH_API tch_status tch_set_host_allocator(const tch_host_allocator *allocator);

TCH_END_DECLS

#endif
