/* Device memory, in stream order from a private CUDA memory pool per device, shared by its contexts. The pool retains
 * nothing: src/core/pool.c caches blocks, and what it returns goes back to the device. */
#include "backends/cuda/cuda.h"

#include <pthread.h>

/* --- the device's pool ------------------------------------------------------------------------------------------- */

enum { MAX_DEVICES = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int made;
    cudaMemPool_t pool; /* NULL if the device does not support one: then cudaMalloc and cudaFree */
} pools[MAX_DEVICES];

static cudaError_t make_pool(int32_t device, cudaMemPool_t *pool)
{
    struct cudaMemPoolProps properties = {.allocType = cudaMemAllocationTypePinned,
                                          .location = {.type = cudaMemLocationTypeDevice, .id = device}};
    int supported = 0;
    cudaError_t error = cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device);
    return error == cudaSuccess && supported ? cudaMemPoolCreate(pool, &properties) : error;
}

/* Created once and never destroyed: memory may return to it until the process ends. */
static cudaError_t pool_of(int32_t device, cudaMemPool_t *pool)
{
    cudaError_t error = cudaSuccess;
    *pool = NULL;
    if (device >= MAX_DEVICES) {
        return cudaSuccess;
    }
    pthread_mutex_lock(&lock);
    if (!pools[device].made) {
        error = make_pool(device, &pools[device].pool);
        pools[device].made = error == cudaSuccess;
    }
    *pool = pools[device].pool;
    pthread_mutex_unlock(&lock);
    return error;
}

/* --- allocation -------------------------------------------------------------------------------------------------- */

static cudaError_t allocate_block(const tchi_cuda_state *s, cudaMemPool_t pool, size_t bytes, void **pointer)
{
    return pool != NULL ? cudaMallocFromPoolAsync(pointer, bytes, pool, s->stream) : cudaMalloc(pointer, bytes);
}

/* Freed memory still in use by the stream becomes available only after a synchronization. */
static cudaError_t allocate_after_wait(const tchi_cuda_state *s, cudaMemPool_t pool, size_t bytes, void **pointer)
{
    cudaGetLastError();
    cudaError_t error = cudaStreamSynchronize(s->stream);
    if (error == cudaSuccess && pool != NULL) {
        error = cudaMemPoolTrimTo(pool, 0);
    }
    return error == cudaSuccess ? allocate_block(s, pool, bytes, pointer) : error;
}

static tch_status out_of_memory(const tchi_cuda_state *s, int64_t bytes)
{
    size_t available = 0;
    size_t total = 0;
    cudaGetLastError();
    if (cudaMemGetInfo(&available, &total) != cudaSuccess) {
        cudaGetLastError();
    }
    return tchi_cuda_host->fail(TCH_ERR_OUT_OF_MEMORY,
                                "out of memory on cuda:%d: %lld bytes were requested, %lld of %lld are free",
                                s->device.index, (long long)bytes, (long long)available, (long long)total);
}

/* During capture an allocation would become a graph node, whose memory is freed with the graph. A call made before with
 * the same sizes reuses memory of src/core/pool.c and does not get here. */
tch_status tchi_cuda_allocate(void *state, int64_t bytes, void **pointer)
{
    const tchi_cuda_state *s = state;
    cudaMemPool_t pool = NULL;
    if (tchi_cuda_is_capturing(s->stream)) {
        return tchi_cuda_host->fail(TCH_ERR_UNSUPPORTED,
                                    "%lld bytes of GPU memory were requested while the stream is being captured in a "
                                    "graph; make the same call once before capturing, so that its memory is there",
                                    (long long)bytes);
    }
    TCHI_CUDA_TRY(pool_of(s->device.index, &pool), "making a memory pool");
    cudaError_t error = allocate_block(s, pool, (size_t)bytes, pointer);
    if (error == cudaErrorMemoryAllocation) {
        error = allocate_after_wait(s, pool, (size_t)bytes, pointer);
    }
    return error == cudaErrorMemoryAllocation ? out_of_memory(s, bytes) : tchi_cuda_check(error, "allocating memory");
}

/* In stream order: queued work may still use the block. During capture only a stream outside the graph can free it, and
 * the graph does not use any block that comes here. */
static void release_block(const tchi_cuda_state *s, cudaMemPool_t pool, void *pointer)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    if (pool == NULL) {
        cudaFree(pointer);
    } else if (!tchi_cuda_is_capturing(s->stream)) {
        cudaFreeAsync(pointer, s->stream);
    } else {
        cudaThreadExchangeStreamCaptureMode(&mode);
        cudaFreeAsync(pointer, s->local);
        cudaThreadExchangeStreamCaptureMode(&mode);
    }
}

/* May be called from any thread, also outside begin and end: a tensor may outlive its context. The device gets the
 * memory at the next synchronization. */
void tchi_cuda_release(void *state, void *pointer, int64_t bytes)
{
    const tchi_cuda_state *s = state;
    cudaMemPool_t pool = NULL;
    if (pointer == NULL || tchi_cuda_begin(state) != TCH_OK) {
        return;
    }
    pool_of(s->device.index, &pool);
    release_block(s, pool, pointer);
    cudaGetLastError();
    tchi_cuda_end(state);
}

tch_status tchi_cuda_memory_info(void *state, int64_t *total, int64_t *free)
{
    size_t available = 0;
    size_t all = 0;
    TCHI_CUDA_TRY(cudaMemGetInfo(&available, &all), "cudaMemGetInfo");
    *total = (int64_t)all;
    *free = (int64_t)available;
    return TCH_OK;
}

/* --- plain bytes ------------------------------------------------------------------------------------------------- */

static int is_page_locked(const void *pointer)
{
    struct cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return attributes.type != cudaMemoryTypeUnregistered;
}

/* A replayed graph would read pageable memory that the caller may have freed; and copies to the host must be complete
 * on return. */
static tch_status check_capture(const tchi_cuda_state *s, const void *src, tch_copy_kind kind)
{
    if (kind == TCH_COPY_DEVICE || !tchi_cuda_is_capturing(s->stream) ||
        (kind == TCH_COPY_TO_DEVICE && is_page_locked(src))) {
        return TCH_OK;
    }
    return tchi_cuda_host->fail(TCH_ERR_UNSUPPORTED,
                                kind == TCH_COPY_TO_HOST
                                    ? "a copy to the host synchronizes, and the stream is being captured in a graph"
                                    : "a copy from pageable host memory cannot be captured in a graph; use page-locked "
                                      "memory");
}

/* Copies from pageable memory return after CUDA has staged the bytes, so the buffer can be reused. Copies from
 * page-locked memory are asynchronous and read the buffer later. */
tch_status tchi_cuda_copy_bytes(void *state, void *dst, const void *src, int64_t bytes, tch_copy_kind kind)
{
    static const enum cudaMemcpyKind kinds[] = {cudaMemcpyDeviceToDevice, cudaMemcpyHostToDevice,
                                                cudaMemcpyDeviceToHost};
    tchi_cuda_state *s = state;
    if (bytes == 0) {
        return TCH_OK;
    }
    if (kind == TCH_COPY_NUMBERS) {
        return tchi_cuda_store_numbers(s, dst, src, bytes / (int64_t)sizeof(double));
    }
    TCHI_TRY(check_capture(s, src, kind));
    TCHI_CUDA_TRY(cudaMemcpyAsync(dst, src, (size_t)bytes, kinds[kind], s->stream), "copying bytes");
    if (kind == TCH_COPY_TO_HOST) {
        TCHI_CUDA_TRY(cudaStreamSynchronize(s->stream), "waiting for a copy to the host");
    }
    return TCH_OK;
}

tch_status tchi_cuda_zero_bytes(void *state, void *dst, int64_t bytes)
{
    const tchi_cuda_state *s = state;
    if (bytes == 0) {
        return TCH_OK;
    }
    return tchi_cuda_check(cudaMemsetAsync(dst, 0, (size_t)bytes, s->stream), "zeroing memory");
}
