/* A pool of device blocks. Freed blocks are kept in lists by size class and reused for requests of the same class, so a
 * steady state allocates nothing:
 *
 *     sizes      ... 1024 | 1152 | 1280 | ... | 1920 | 2048 | 2304 ...      eight classes to each power of two,
 *     free[c]        o-o           o                     o-o-o              at most an eighth of a block wasted
 *
 * Bookkeeping is in host memory, one record per block, in a small hash table by address. */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>

#include "allocator.h"
#include "list.h"
#include "status.h"

#define SMALLEST 512
#define STEPS 8 /* classes to each power of two */
#define CLASSES (64 * STEPS)
#define BUCKETS 256

typedef struct block {
    void *pointer;
    int64_t bytes; /* of its class */
    int in_use;
    int exact; /* of no class: goes back to the device when freed */
    struct block *next_in_bucket;
    struct block *next_free;
} block;

struct tchi_pool {
    const tch_backend *backend;
    void *state;
    int32_t index;
    atomic_int references;
    pthread_mutex_t lock; /* a tensor may be destroyed by another thread than the context's */
    block *buckets[BUCKETS];
    block *free[CLASSES];
    int64_t allocated, reserved, peak, requests, misses;
};

/* The size class of a request; *bytes becomes its block size. */
static int size_class(int64_t *bytes)
{
    int64_t size = *bytes < SMALLEST ? SMALLEST : *bytes;
    int exponent = 63 - __builtin_clzll((unsigned long long)size);
    int64_t step = ((int64_t)1 << exponent) / STEPS;
    int64_t steps = (size - ((int64_t)1 << exponent) + step - 1) / step;
    *bytes = ((int64_t)1 << exponent) + steps * step;
    return exponent * STEPS + (int)steps;
}

int64_t tchi_pool_block_size(int64_t bytes)
{
    size_class(&bytes);
    return bytes;
}

static size_t bucket_of(const void *pointer)
{
    uint64_t key = (uint64_t)(uintptr_t)pointer >> 8;
    return (size_t)((key * 0x9E3779B97F4A7C15u) >> 56) % BUCKETS;
}

static block *find_block(const tchi_pool *pool, const void *pointer)
{
    block *b = pool->buckets[bucket_of(pointer)];
    while (b != NULL && b->pointer != pointer) {
        b = b->next_in_bucket;
    }
    return b;
}

/* Returns a free block, already removed from its free list, to the device. */
static void discard_block(tchi_pool *pool, block *gone)
{
    block **link = &pool->buckets[bucket_of(gone->pointer)];
    while (*link != gone) {
        link = &(*link)->next_in_bucket;
    }
    *link = gone->next_in_bucket;
    pool->reserved -= gone->bytes;
    pool->backend->device->release(pool->state, gone->pointer, gone->bytes);
    tchi_host_release(gone, sizeof *gone);
}

/* Largest blocks first: they free the most with the fewest calls. */
static void trim_locked(tchi_pool *pool, int64_t keep)
{
    for (int c = CLASSES - 1; c >= 0; c--) {
        while (pool->free[c] != NULL && pool->reserved - pool->allocated > keep) {
            block *gone = pool->free[c];
            pool->free[c] = gone->next_free;
            discard_block(pool, gone);
        }
    }
}

static tch_status new_block(tchi_pool *pool, int64_t bytes, block **result)
{
    block *fresh;
    TCHI_TRY(tchi_host_take(sizeof *fresh, "the pool's bookkeeping", &fresh));
    tch_status status = pool->backend->device->allocate(pool->state, bytes, &fresh->pointer);
    if (status == TCH_ERR_OUT_OF_MEMORY && pool->reserved > pool->allocated) {
        trim_locked(pool, 0);
        status = pool->backend->device->allocate(pool->state, bytes, &fresh->pointer);
    }
    if (status != TCH_OK) {
        tchi_host_release(fresh, sizeof *fresh);
        return status;
    }
    fresh->bytes = bytes;
    block **bucket = &pool->buckets[bucket_of(fresh->pointer)];
    fresh->next_in_bucket = *bucket;
    *bucket = fresh;
    pool->reserved += bytes;
    pool->misses++;
    *result = fresh;
    return TCH_OK;
}

/* From a free list, or, if `kept` is NULL, from the device for this request alone. */
static tch_status take_block(tchi_pool *pool, int64_t bytes, block **kept, void **pointer)
{
    tch_status status = TCH_OK;
    pthread_mutex_lock(&pool->lock);
    block *b = kept != NULL ? *kept : NULL;
    if (b != NULL) {
        *kept = b->next_free;
    } else {
        status = new_block(pool, bytes, &b);
    }
    if (b != NULL) {
        b->in_use = 1;
        b->exact = kept == NULL;
        b->next_free = NULL;
        pool->requests++;
        pool->allocated += b->bytes;
        pool->peak = pool->allocated > pool->peak ? pool->allocated : pool->peak;
        *pointer = b->pointer;
    }
    pthread_mutex_unlock(&pool->lock);
    return status;
}

static tch_status check_and_take_block(tchi_pool *pool, int64_t bytes, bool exact, void **pointer)
{
    *pointer = NULL;
    if (bytes < 0 || bytes > INT64_MAX / 4) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "an allocation of %lld bytes was requested", (long long)bytes);
    }
    block **kept = exact || bytes == 0 ? NULL : &pool->free[size_class(&bytes)];
    return bytes == 0 ? TCH_OK : take_block(pool, bytes, kept, pointer);
}

tch_status tchi_pool_allocate(tchi_pool *pool, int64_t bytes, void **pointer)
{
    return check_and_take_block(pool, bytes, false, pointer);
}

tch_status tchi_pool_allocate_exact(tchi_pool *pool, int64_t bytes, void **pointer)
{
    return check_and_take_block(pool, bytes, true, pointer);
}

tch_status tchi_pool_free(tchi_pool *pool, void *pointer)
{
    if (pointer == NULL) {
        return TCH_OK;
    }
    pthread_mutex_lock(&pool->lock);
    block *b = find_block(pool, pointer);
    int ours = b != NULL && b->in_use;
    if (ours && b->exact) {
        pool->allocated -= b->bytes;
        discard_block(pool, b);
    } else if (ours) {
        int64_t bytes = b->bytes;
        int class = size_class(&bytes);
        b->in_use = 0;
        b->next_free = pool->free[class];
        pool->free[class] = b;
        pool->allocated -= b->bytes;
    }
    pthread_mutex_unlock(&pool->lock);
    if (!ours) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "pointer %p is not in use in this pool: it was freed before, or comes from elsewhere",
                         pointer);
    }
    return TCH_OK;
}

void tchi_pool_trim(tchi_pool *pool, int64_t keep)
{
    pthread_mutex_lock(&pool->lock);
    trim_locked(pool, keep);
    pthread_mutex_unlock(&pool->lock);
}

void tchi_pool_reset_peak(tchi_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->peak = pool->allocated;
    pthread_mutex_unlock(&pool->lock);
}

void tchi_pool_figures(tchi_pool *pool, tch_memory_info *info)
{
    pthread_mutex_lock(&pool->lock);
    info->allocated = pool->allocated;
    info->reserved = pool->reserved;
    info->peak = pool->peak;
    info->requests = pool->requests;
    info->misses = pool->misses;
    pthread_mutex_unlock(&pool->lock);
}

tch_status tchi_pool_create(const tch_backend *backend, int32_t index, tchi_pool **pool)
{
    tchi_pool *p;
    TCHI_TRY(tchi_host_take(sizeof *p, "a context", &p));
    p->backend = backend;
    p->index = index;
    atomic_init(&p->references, 1);
    tch_status status = backend->device->state_create(index, &p->state);
    if (status != TCH_OK) {
        tchi_host_release(p, sizeof *p);
        return status;
    }
    pthread_mutex_init(&p->lock, NULL);
    *pool = p;
    return TCH_OK;
}

void tchi_pool_retain(tchi_pool *pool)
{
    atomic_fetch_add(&pool->references, 1);
}

/* Blocks still in use are raw memory of tch_memory_alloc that was not freed: tensors hold references. */
static void discard_everything(tchi_pool *pool)
{
    for (int i = 0; i < BUCKETS; i++) {
        while (pool->buckets[i] != NULL) {
            discard_block(pool, pool->buckets[i]);
        }
    }
}

void tchi_pool_drop(tchi_pool *pool)
{
    if (atomic_fetch_sub(&pool->references, 1) != 1) {
        return;
    }
    discard_everything(pool);
    pool->backend->device->state_destroy(pool->state);
    pthread_mutex_destroy(&pool->lock);
    tchi_host_release(pool, sizeof *pool);
}

void *tchi_pool_state(const tchi_pool *pool)
{
    return pool->state;
}

tch_device tchi_pool_device(const tchi_pool *pool)
{
    return (tch_device){pool->backend->device_type, pool->index};
}
