/* The memory pool of a context, which owns the backend's state.
 *
 * The pool is reference-counted by the context and by every tensor allocated from it, so a tensor may outlive its
 * context. */
#ifndef TCHI_POOL_H
#define TCHI_POOL_H

#include <stdint.h>

#include <torchium/backend.h>
#include <torchium/memory.h>

typedef struct tchi_pool tchi_pool;

/* Creates the backend's state for device `index` and an empty pool over it, with one reference. */
tch_status tchi_pool_create(const tch_backend *backend, int32_t index, tchi_pool **pool);
void tchi_pool_retain(tchi_pool *pool);
/* Drops a reference; the last one frees all memory and the state. */
void tchi_pool_drop(tchi_pool *pool);

void *tchi_pool_state(const tchi_pool *pool);
tch_device tchi_pool_device(const tchi_pool *pool);

/* 0 bytes give NULL. If the device is out of memory the free blocks are returned to it and the request is retried. */
tch_status tchi_pool_allocate(tchi_pool *pool, int64_t bytes, void **pointer);
/* The same without rounding to a size class, for large, long-lived blocks, which return to the device when freed. */
tch_status tchi_pool_allocate_exact(tchi_pool *pool, int64_t bytes, void **pointer);
/* The block size for a request of this size. */
int64_t tchi_pool_block_size(int64_t bytes);
/* Keeps the block for reuse. TCH_ERR_INVALID_ARGUMENT if the pool does not own the pointer. */
tch_status tchi_pool_free(tchi_pool *pool, void *pointer);
void tchi_pool_trim(tchi_pool *pool, int64_t keep);
void tchi_pool_reset_peak(tchi_pool *pool);
/* Fills the pool's figures; total and free, the device's, are unchanged. */
void tchi_pool_figures(tchi_pool *pool, tch_memory_info *info);

#endif
