/* Bytes on their way to the host: page-locked memory, and an event behind the copy into it. */
#include "backends/cuda/cuda.h"

#include <stdalign.h>
#include <stddef.h>

#include "capture.h"

typedef struct readback {
    void *memory; /* page-locked */
    cudaEvent_t arrived;
    int posted;
} readback;

static cudaError_t open_readback(readback *r, int64_t bytes)
{
    cudaError_t error = cudaEventCreateWithFlags(&r->arrived, cudaEventDisableTiming);
    return error == cudaSuccess ? cudaMallocHost(&r->memory, (size_t)bytes) : error;
}

tch_status tchi_cuda_readback_create(void *state, int64_t bytes, void **result)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    readback *r = tchi_cuda_host->allocate(sizeof *r, alignof(max_align_t));
    if (r == NULL) {
        return tchi_cuda_host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %zu bytes for a readback", sizeof *r);
    }
    *r = (readback){0};
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaError_t error = open_readback(r, bytes);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) {
        tchi_cuda_readback_destroy(state, r);
        return tchi_cuda_check(error, "page-locked memory for a readback");
    }
    *result = r;
    return TCH_OK;
}

tch_status tchi_cuda_readback_post(void *state, void *handle, const void *src, int64_t bytes)
{
    const tchi_cuda_state *s = state;
    readback *r = handle;
    if (tchi_cuda_is_capturing(s->stream)) {
        return TCH_OK;
    }
    TCHI_CUDA_TRY(cudaMemcpyAsync(r->memory, src, (size_t)bytes, cudaMemcpyDeviceToHost, s->stream), "a readback");
    TCHI_CUDA_TRY(cudaEventRecord(r->arrived, s->stream), "the event of a readback");
    r->posted = 1;
    return TCH_OK;
}

tch_status tchi_cuda_readback_wait(void *state, void *handle, const void **data)
{
    const tchi_cuda_state *s = state;
    const readback *r = handle;
    *data = NULL;
    if (!r->posted || tchi_cuda_is_capturing(s->stream)) {
        return TCH_OK;
    }
    TCHI_CUDA_TRY(cudaEventSynchronize(r->arrived), "waiting for a readback");
    *data = r->memory;
    return TCH_OK;
}

/* The copy may be under way: page-locked memory is released when the device is done with it. */
void tchi_cuda_readback_destroy(void *state, void *handle)
{
    readback *r = handle;
    if (r == NULL) {
        return;
    }
    if (tchi_cuda_begin(state) == TCH_OK) {
        if (r->arrived != NULL) {
            cudaEventDestroy(r->arrived);
        }
        cudaFreeHost(r->memory);
        cudaGetLastError();
        tchi_cuda_end(state);
    }
    tchi_cuda_host->release(r, sizeof *r);
}
