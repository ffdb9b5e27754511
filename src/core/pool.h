/* The memory pool of a context, and the device state it stands on.
 *
 * The pool owns the backend's state and is shared by reference: the context holds one, and so does every tensor made
 * from it, so a tensor may outlive its context. */
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

/* 0 bytes give NULL. On out of memory the kept blocks are returned to the device and the request tried once more. */
tch_status tchi_pool_allocate(tchi_pool *pool, int64_t bytes, void **pointer);
/* The same without rounding up to a size class: for what is large and stays long. Freed, it goes back to the device. */
tch_status tchi_pool_allocate_exact(tchi_pool *pool, int64_t bytes, void **pointer);
/* What a request of this size takes from the device: blocks come in size classes. */
int64_t tchi_pool_block_size(int64_t bytes);
/* Keeps the block for reuse. TCH_ERR_INVALID_ARGUMENT when the pointer is none of the pool's. */
tch_status tchi_pool_free(tchi_pool *pool, void *pointer);
void tchi_pool_trim(tchi_pool *pool, int64_t keep);
void tchi_pool_reset_peak(tchi_pool *pool);
/* Fills the pool's figures; total and free are the device's and are left alone. */
void tchi_pool_figures(tchi_pool *pool, tch_memory_info *info);

#endif
