/* Memory: figures, the pool behind a context, and the host allocator everything stands on. */
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
    int64_t free;       /* of it, unused by anybody */
    int64_t allocated;  /* handed out by this context's pool and not yet freed */
    int64_t reserved;   /* held by the pool: allocated, plus what it keeps for reuse */
    int64_t peak;       /* the highest `allocated` since creation or tch_memory_reset_peak */
    int64_t requests;   /* allocations asked of the pool */
    int64_t misses;     /* of them, those that had to go to the device: constant in a steady state */
} tch_memory_info;
#define TCH_MEMORY_INFO_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(tch_memory_info), 0, 0, 0, 0, 0, 0, 0                                                                   \
    }

/* Where host memory comes from. `allocate` returns memory aligned to `alignment` (a power of two), or NULL. */
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

/* Gives it back to the pool, which may hand it out again at once: on a GPU its next user comes later on the
 * context's stream. Work on other streams must be done with it. NULL is allowed; a pointer the pool did not hand out
 * is an error. */
TCH_API tch_status tch_memory_free(tch_context *context, void *pointer);

/* Waits, then returns kept memory to the device until at most `keep` bytes are held for reuse. The workspace counts as
 * kept. A GPU has the memory back after the wait that follows. */
TCH_API tch_status tch_memory_trim(tch_context *context, int64_t keep);

/* Makes `peak` start again from what is allocated now. */
TCH_API tch_status tch_memory_reset_peak(tch_context *context);

/* Replaces the allocator of all host memory the library takes, small bookkeeping included; NULL restores the default.
 * Allowed only while no context and no tensor exists. */
TCH_API tch_status tch_set_host_allocator(const tch_host_allocator *allocator);

TCH_END_DECLS

#endif
