/* Recorded work: a CUDA graph for what was queued between begin and end, launched as a whole. It is captured on a
 * stream of our own, since the context's may be the default stream, which cannot be; before changing anything here read
 * what CUDA forbids during capture, to this thread and to others. */
#include "backends/cuda/cuda.h"

#include <stdlib.h>
#include <string.h>

#include "capture.h"

/* --- whether ----------------------------------------------------------------------------------------------------- */

static int is_set(const char *variable, const char *value)
{
    const char *text = getenv(variable);
    return text != NULL && strcmp(text, value) == 0;
}

/* A graph cannot synchronize after each kernel. */
void tchi_cuda_recorder_init(tchi_cuda_recorder *recorder)
{
    recorder->wanted = !is_set("TORCHIUM_CUDA_RECORD", "0") && !is_set("TORCHIUM_DEBUG_SYNC", "1");
}

/* What the caller captures is to hold the work itself: he may replay it when our graphs are gone. */
int32_t tchi_cuda_recording_possible(void *state)
{
    const tchi_cuda_state *s = state;
    return s->recorder.wanted && !tchi_cuda_is_capturing(s->stream);
}

/* --- recording --------------------------------------------------------------------------------------------------- */

/* While another thread captures, CUDA refuses calls that might disturb it, and may end its capture for them. None of
 * ours touches another stream, so we ask for none of that. Called again with the same variable it is undone. */
static void exchange_mode(enum cudaStreamCaptureMode *mode)
{
    cudaThreadExchangeStreamCaptureMode(mode);
}

static cudaError_t open_stream(tchi_cuda_recorder *recorder)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    if (recorder->stream != NULL) {
        return cudaSuccess;
    }
    exchange_mode(&mode);
    cudaError_t error = cudaStreamCreateWithFlags(&recorder->stream, cudaStreamNonBlocking);
    exchange_mode(&mode);
    return error;
}

/* Relaxed, so that a library which loads a kernel only now does not end the capture. */
tch_status tchi_cuda_recording_begin(void *state)
{
    tchi_cuda_state *s = state;
    tchi_cuda_recorder *recorder = &s->recorder;
    TCHI_CUDA_TRY(open_stream(recorder), "a stream for recording");
    recorder->main = s->stream;
    tch_status status = tchi_cuda_use_stream(s, recorder->stream);
    if (status == TCH_OK) {
        status = tchi_cuda_check(cudaStreamBeginCapture(recorder->stream, cudaStreamCaptureModeRelaxed),
                                 "cudaStreamBeginCapture");
    }
    if (status != TCH_OK) {
        tchi_cuda_use_stream(s, recorder->main);
    }
    return status;
}

/* NULL where there is none; the error is forgotten. */
static cudaGraphExec_t make_executable(cudaGraph_t graph)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaGraphExec_t executable = NULL;
    if (graph == NULL) {
        cudaGetLastError();
        return NULL;
    }
    exchange_mode(&mode);
    if (cudaGraphInstantiate(&executable, graph, 0) != cudaSuccess) {
        cudaGetLastError();
        executable = NULL;
    }
    cudaGraphDestroy(graph);
    exchange_mode(&mode);
    return executable;
}

/* Work must not stay on the stream of recordings, whatever else went wrong: that alone is an error. */
tch_status tchi_cuda_recording_end(void *state, void **recording)
{
    tchi_cuda_state *s = state;
    cudaGraph_t graph = NULL;
    if (cudaStreamEndCapture(s->recorder.stream, &graph) != cudaSuccess) {
        graph = NULL;
    }
    tch_status status = tchi_cuda_use_stream(s, s->recorder.main);
    *recording = make_executable(graph);
    return status;
}

/* --- replaying --------------------------------------------------------------------------------------------------- */

tch_status tchi_cuda_recording_replay(void *state, void *recording)
{
    const tchi_cuda_state *s = state;
    return tchi_cuda_check(cudaGraphLaunch(recording, s->stream), "cudaGraphLaunch");
}

/* CUDA keeps a graph that is still running until it is done. */
void tchi_cuda_recording_release(void *state, void *recording)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    if (tchi_cuda_begin(state) != TCH_OK) {
        return;
    }
    exchange_mode(&mode);
    cudaGraphExecDestroy(recording);
    cudaGetLastError();
    exchange_mode(&mode);
    tchi_cuda_end(state);
}

void tchi_cuda_recorder_destroy(tchi_cuda_recorder *recorder)
{
    if (recorder->stream != NULL) {
        cudaStreamDestroy(recorder->stream);
    }
}
