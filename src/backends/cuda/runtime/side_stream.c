/* A second stream of a context, and the events that order it with the first. */
#include "backends/cuda/cuda.h"

tch_status tchi_cuda_side_stream(void *state, void **stream)
{
    tchi_cuda_state *s = state;
    if (s->side == NULL) {
        TCHI_CUDA_TRY(cudaStreamCreateWithFlags(&s->side, cudaStreamNonBlocking), "a second stream");
    }
    *stream = s->side;
    return TCH_OK;
}

tch_status tchi_cuda_event_create(void *state, void **event)
{
    cudaEvent_t made = NULL;
    (void)state;
    TCHI_CUDA_TRY(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreate");
    *event = made;
    return TCH_OK;
}

static tch_status stream_of(tchi_cuda_state *s, int32_t side, cudaStream_t *stream)
{
    void *second = s->stream;
    tch_status status = side ? tchi_cuda_side_stream(s, &second) : TCH_OK;
    *stream = second;
    return status;
}

tch_status tchi_cuda_event_record(void *state, void *event, int32_t side)
{
    cudaStream_t stream;
    TCHI_CUDA_PASS(stream_of(state, side, &stream));
    return tchi_cuda_check(cudaEventRecord(event, stream), "cudaEventRecord");
}

tch_status tchi_cuda_event_wait(void *state, void *event, int32_t side)
{
    cudaStream_t stream;
    TCHI_CUDA_PASS(stream_of(state, side, &stream));
    return tchi_cuda_check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

void tchi_cuda_event_destroy(void *state, void *event)
{
    if (event != NULL && tchi_cuda_begin(state) == TCH_OK) {
        cudaEventDestroy(event);
        tchi_cuda_end(state);
    }
}
