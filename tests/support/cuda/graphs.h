/* What tests of CUDA graphs share: streams, captures, and an optimizer whose steps are captured. Header only: it wants
 * the CUDA runtime, which the library of helpers does without. */
#ifndef TORCHIUM_TESTS_GRAPHS_H
#define TORCHIUM_TESTS_GRAPHS_H

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>

#include "support/tensors.h"
#include "support/testing.h"

#define CHECK_CUDA(call)                                                                                               \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        CHECK(error_ == cudaSuccess, "%s gave %s", #call, cudaGetErrorString(error_));                                 \
    } while (0)

/* A new stream, which the context then works on; and back, with the graph that was captured from it destroyed. */
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

/* The calls that `calls` makes, as a graph. */
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

/* All elements finite and the same to the bit. */
static inline void test_check_same(int count, test_tensor *const *called, test_tensor *const *replayed)
{
    for (int i = 0; i < count; i++) {
        double *x = test_tensor_read(called[i]);
        double *y = test_tensor_read(replayed[i]);
        for (int64_t k = 0; k < called[i]->count; k++) {
            CHECK(x[k] == y[k] && isfinite(x[k]), "tensor %d, element %lld: %.9g by calls, %.9g by replays", i,
                  (long long)k, x[k], y[k]);
        }
    }
}

/* --- an optimizer ------------------------------------------------------------------------------------------------ */

enum { TEST_PARAMETERS = 4 };

typedef struct test_training {
    tch_optimizer *optimizer;
    test_tensor *parameter[TEST_PARAMETERS], *gradient[TEST_PARAMETERS];
    const tch_tensor *gradients[TEST_PARAMETERS];
    int steps; /* for which gradients were drawn */
} test_training;

static inline test_training test_training_begin(tch_context *context, const tch_optim_config *config)
{
    static const int64_t shapes[TEST_PARAMETERS][2] = {{90, 70}, {70, 33}, {64, 64}, {77, 1}};
    test_training t = {0};
    tch_parameter list[TEST_PARAMETERS] = {{0}};
    for (int i = 0; i < TEST_PARAMETERS; i++) {
        t.parameter[i] = test_tensor_make(context, TCH_FLOAT32, 2, shapes[i], LAYOUT_CONTIGUOUS);
        t.gradient[i] = test_tensor_make(context, TCH_FLOAT32, 2, shapes[i], LAYOUT_CONTIGUOUS);
        test_tensor_draw(t.parameter[i], 10 + (uint64_t)i);
        list[i].tensor = &t.parameter[i]->tensor;
        t.gradients[i] = &t.gradient[i]->tensor;
    }
    CHECK_OK(tch_optimizer_create(context, config, NULL, TEST_PARAMETERS, list, &t.optimizer));
    return t;
}

static inline void test_training_end(test_training *t)
{
    tch_optimizer_destroy(t->optimizer);
    for (int i = 0; i < TEST_PARAMETERS; i++) {
        test_tensor_free(t->parameter[i]);
        test_tensor_free(t->gradient[i]);
    }
}

/* The gradients of the next step. */
static inline void test_training_draw(test_training *t)
{
    for (int i = 0; i < TEST_PARAMETERS; i++) {
        test_tensor_draw(t->gradient[i], 100 + (uint64_t)(t->steps * TEST_PARAMETERS + i));
    }
    t->steps++;
}

/* With the gradients that are there. */
static inline tch_status test_training_step(const void *training)
{
    const test_training *t = training;
    return tch_optimizer_step(t->optimizer, TEST_PARAMETERS, t->gradients);
}

#endif
