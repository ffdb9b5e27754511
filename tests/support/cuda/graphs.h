/* Streams and captures for tests of CUDA graphs. Header only: it needs the CUDA runtime, which the helper library does
 * not link. */
#ifndef TORCHIUM_TESTS_GRAPHS_H
#define TORCHIUM_TESTS_GRAPHS_H

#include <cuda_runtime_api.h>

#include "support/tensors.h"
#include "support/testing.h"

#define CHECK_CUDA(call)                                                                                               \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        CHECK(error_ == cudaSuccess, "%s gave %s", #call, cudaGetErrorString(error_));                                 \
    } while (0)

/* Creates a stream for the context; and restores it, destroying the captured graph. */
static inline cudaStream_t test_enter_stream(tch_context *context)
{
    cudaStream_t stream;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_OK(tch_context_set_stream(context, stream));
    return stream;
}

static inline void test_leave_stream(tch_context *context, cudaStream_t stream, cudaGraphExec_t graph)
{
    if (graph != NULL) {
        CHECK_CUDA(cudaGraphExecDestroy(graph));
    }
    CHECK_OK(tch_context_set_stream(context, NULL));
    CHECK_CUDA(cudaStreamDestroy(stream));
}

/* Captures the calls that `calls` makes. */
static inline cudaGraphExec_t test_capture(cudaStream_t stream, tch_status (*calls)(const void *), const void *data)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    tch_status status = calls(data);
    char message[512];
    snprintf(message, sizeof message, "%s", tch_last_error());
    cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    CHECK(status == TCH_OK, "the captured call gave %s: %s", tch_status_name(status), message);
    CHECK(ended == cudaSuccess, "the capture ended with %s", cudaGetErrorString(ended));
    CHECK_CUDA(cudaGraphInstantiateWithFlags(&executable, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    return executable;
}

#endif
