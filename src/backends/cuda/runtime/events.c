/* Events of a state's second stream, and readbacks: copies to page-locked memory followed by an event. */
#include "backends/cuda/cuda.h"
#include "backends/host_memory.h"

typedef struct event {
    cudaEvent_t reached;
    void *memory; /* of a readback: page-locked */
    bool recorded;
} event;

/* Does nothing if there is an event already. */
static tch_status make_event(void *state, int64_t bytes, void **result)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    if (*result != NULL) {
        return TCH_OK;
    }
    event *e;
    TCHI_TRY(tchi_backend_take(tchi_cuda_host, sizeof *e, "an event", &e));
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaError_t error = tchi_cuda_ensure_event(&e->reached);
    if (error == cudaSuccess && bytes > 0) {
        error = cudaMallocHost(&e->memory, (size_t)bytes);
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    tch_status status = tchi_cuda_check(error, bytes > 0 ? "page-locked memory for a readback" : "an event");
    if (status != TCH_OK) {
        tchi_cuda_event_destroy(state, e);
        return status;
    }
    *result = e;
    return TCH_OK;
}

/* A copy may be in flight: cudaFreeHost waits for it. */
void tchi_cuda_event_destroy(void *state, void *handle)
{
    event *e = handle;
    if (e == NULL) {
        return;
    }
    if (tchi_cuda_begin(state) == TCH_OK) {
        tchi_cuda_drop_event(e->reached);
        if (e->memory != NULL) {
            cudaFreeHost(e->memory);
        }
        cudaGetLastError();
        tchi_cuda_end(state);
    }
    tchi_cuda_host->release(e, sizeof *e);
}

/* --- readbacks --------------------------------------------------------------------------------------------------- */

tch_status tchi_cuda_readback_post(void *state, void **handle, const void *src, int64_t bytes)
{
    const tchi_cuda_state *s = state;
    tch_status status = make_event(state, bytes, handle);
    event *e = *handle;
    if (e == NULL) {
        return status;
    }
    if (tchi_cuda_is_capturing(s->stream)) {
        return TCH_OK;
    }
    TCHI_CUDA_TRY(cudaMemcpyAsync(e->memory, src, (size_t)bytes, cudaMemcpyDeviceToHost, s->stream), "a readback");
    TCHI_CUDA_TRY(cudaEventRecord(e->reached, s->stream), "the event of a readback");
    e->recorded = true;
    return TCH_OK;
}

tch_status tchi_cuda_readback_wait(void *state, void *handle, const void **data)
{
    const tchi_cuda_state *s = state;
    const event *e = handle;
    *data = NULL;
    if (!e->recorded || tchi_cuda_is_capturing(s->stream)) {
        return TCH_OK;
    }
    TCHI_CUDA_TRY(cudaEventSynchronize(e->reached), "waiting for a readback");
    *data = e->memory;
    return TCH_OK;
}

/* --- the second stream ------------------------------------------------------------------------------------------- */

/* Of the highest priority: what is sent must not wait for computation that has been launched earlier. */
static tch_status open_side(tchi_cuda_state *s)
{
    int least, greatest;
    if (s->side == NULL) {
        TCHI_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
        TCHI_CUDA_TRY(cudaStreamCreateWithPriority(&s->side, cudaStreamNonBlocking, greatest), "a second stream");
    }
    return tchi_cuda_check(tchi_cuda_ensure_event(&s->forked), "cudaEventCreate");
}

tch_status tchi_cuda_side_begin(void *state, void **stream)
{
    tchi_cuda_state *s = state;
    TCHI_TRY(open_side(s));
    TCHI_CUDA_TRY(cudaEventRecord(s->forked, s->stream), "cudaEventRecord");
    TCHI_CUDA_TRY(cudaStreamWaitEvent(s->side, s->forked, 0), "cudaStreamWaitEvent");
    *stream = s->side;
    return TCH_OK;
}

tch_status tchi_cuda_side_mark(void *state, void **handle)
{
    tchi_cuda_state *s = state;
    TCHI_TRY(open_side(s));
    tch_status status = make_event(state, 0, handle);
    event *e = *handle;
    if (e == NULL) {
        return status;
    }
    return tchi_cuda_check(cudaEventRecord(e->reached, s->side), "cudaEventRecord");
}

tch_status tchi_cuda_side_join(void *state, void *handle)
{
    const tchi_cuda_state *s = state;
    const event *e = handle;
    return e == NULL ? TCH_OK : tchi_cuda_check(cudaStreamWaitEvent(s->stream, e->reached, 0), "cudaStreamWaitEvent");
}
