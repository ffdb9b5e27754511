/* A step of every optimizer, captured in a CUDA graph and replayed: parameters must go the same way, to the bit, as
 * with calls. Clocks and decisions live on the device, so a replay corrects for bias and skips a bad gradient like a
 * call. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "support/optim/optim_defaults.h"
#include "support/tensors.h"
#include "support/testing.h"

#define CHECK_CUDA(call)                                                                                               \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        CHECK(error_ == cudaSuccess, "%s gave %s", #call, cudaGetErrorString(error_));                                 \
    } while (0)

enum { PARAMETERS = 4, WARM = 3, REPLAYS = 6 };

static const int64_t shapes[PARAMETERS][2] = {{45, 70}, {70, 33}, {64, 64}, {77, 1}};

typedef struct training {
    tch_context *context;
    tch_optimizer *optimizer;
    test_tensor *parameter[PARAMETERS], *gradient[PARAMETERS];
    const tch_tensor *gradients[PARAMETERS];
} training;

static training begin(tch_context *context, const tch_optim_config *config)
{
    training t = {.context = context};
    tch_parameter list[PARAMETERS] = {{0}};
    for (int i = 0; i < PARAMETERS; i++) {
        t.parameter[i] = test_tensor_make(context, TCH_FLOAT32, 2, shapes[i], LAYOUT_CONTIGUOUS);
        t.gradient[i] = test_tensor_make(context, TCH_FLOAT32, 2, shapes[i], LAYOUT_CONTIGUOUS);
        test_tensor_draw(t.parameter[i], 10 + (uint64_t)i);
        list[i].tensor = &t.parameter[i]->tensor;
        t.gradients[i] = &t.gradient[i]->tensor;
    }
    CHECK_OK(tch_optimizer_create(context, config, PARAMETERS, list, &t.optimizer));
    return t;
}

static void end(training *t)
{
    tch_optimizer_destroy(t->optimizer);
    for (int i = 0; i < PARAMETERS; i++) {
        test_tensor_free(t->parameter[i]);
        test_tensor_free(t->gradient[i]);
    }
}

static void set_gradients(training *t, int step)
{
    for (int i = 0; i < PARAMETERS; i++) {
        test_tensor_draw(t->gradient[i], 100 + (uint64_t)(step * PARAMETERS + i));
    }
}

static void call(training *t, int step)
{
    set_gradients(t, step);
    CHECK_OK(tch_optimizer_step(t->optimizer, PARAMETERS, t->gradients));
}

static cudaGraphExec_t capture(training *t, cudaStream_t stream)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    char message[512];
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    tch_status status = tch_optimizer_step(t->optimizer, PARAMETERS, t->gradients);
    snprintf(message, sizeof message, "%s", tch_last_error());
    cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    CHECK(status == TCH_OK, "the captured step gave %s: %s", tch_status_name(status), message);
    CHECK(ended == cudaSuccess, "the capture ended with %s", cudaGetErrorString(ended));
    CHECK_CUDA(cudaGraphInstantiateWithFlags(&executable, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    return executable;
}

static void compare(const training *a, const training *b)
{
    for (int i = 0; i < PARAMETERS; i++) {
        double *x = test_tensor_read(a->parameter[i]);
        double *y = test_tensor_read(b->parameter[i]);
        for (int64_t k = 0; k < a->parameter[i]->count; k++) {
            CHECK(x[k] == y[k] && isfinite(x[k]), "parameter %d, element %lld: %.9g by calls, %.9g by replays", i,
                  (long long)k, x[k], y[k]);
        }
    }
}

static void check_kind(tch_context *context, const tch_optim_config *config, const char *name)
{
    cudaStream_t stream;
    tch_memory_info before = TCH_MEMORY_INFO_INIT;
    tch_memory_info after = TCH_MEMORY_INFO_INIT;
    test_case("%s", name);
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_OK(tch_context_set_stream(context, stream));
    training called = begin(context, config);
    training replayed = begin(context, config);
    for (int step = 0; step < WARM; step++) {
        call(&called, step);
        call(&replayed, step);
    }
    CHECK_OK(tch_memory_get_info(context, &before));
    cudaGraphExec_t graph = capture(&replayed, stream);
    for (int step = WARM; step < WARM + REPLAYS; step++) {
        call(&called, step);
        set_gradients(&replayed, step);
        CHECK_CUDA(cudaGraphLaunch(graph, stream));
    }
    CHECK_OK(tch_context_synchronize(context));
    CHECK_OK(tch_memory_get_info(context, &after));
    CHECK(after.misses == before.misses, "%lld allocations in the steady state",
          (long long)(after.misses - before.misses));
    compare(&called, &replayed);
    CHECK_CUDA(cudaGraphExecDestroy(graph));
    end(&called);
    end(&replayed);
    CHECK_OK(tch_context_set_stream(context, NULL));
    CHECK_CUDA(cudaStreamDestroy(stream));
}

static void steps_are_captured_and_replayed(void **state)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        tch_optim_config config = test_optim_defaults((tch_optim_kind)kind);
        config.lr = 0.01;
        config.momentum = kind == TCH_OPTIM_SGD ? 0.9 : config.momentum;
        config.precondition_frequency = 1;
        config.max_preconditioner_dim = kind == TCH_OPTIM_SHAMPOO ? 40 : config.max_preconditioner_dim;
        char name[64];
        check_kind(*state, &config, tch_optim_kind_name(config.kind));
        for (int dtype = TCH_STATE_BFLOAT16; dtype <= TCH_STATE_INT8; dtype++) {
            tch_optim_config narrow = config;
            narrow.state_dtype = (tch_state_dtype)dtype;
            snprintf(name, sizeof name, "%s, state_dtype %d", tch_optim_kind_name(config.kind), dtype);
            check_kind(*state, &narrow, name);
        }
    }
    tch_optim_config config = test_optim_defaults(TCH_OPTIM_SHAMPOO);
    config.grafting = TCH_GRAFTING_ADAM;
    config.beta2 = 0.99;
    config.momentum = 0.5;
    config.precondition_frequency = 100;
    config.stagger = 0;
    check_kind(*state, &config, "shampoo between refreshes");
}

/* The decision to skip is taken on the device, inside the graph. */
static void a_replay_skips_a_bad_gradient(void **state)
{
    tch_context *context = *state;
    cudaStream_t stream;
    test_case("NaN in a replay");
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_OK(tch_context_set_stream(context, stream));
    tch_optim_config config = tch_optim_defaults(TCH_OPTIM_ADAMW);
    training good = begin(context, &config);
    training t = begin(context, &config);
    call(&good, 0);
    call(&t, 0);
    cudaGraphExec_t graph = capture(&t, stream);
    double *values = test_tensor_read(t.gradient[1]);
    values[5] = NAN;
    test_tensor_write(t.gradient[1], values);
    CHECK_CUDA(cudaGraphLaunch(graph, stream));
    set_gradients(&t, 1);
    CHECK_CUDA(cudaGraphLaunch(graph, stream));
    call(&good, 1);
    CHECK_OK(tch_context_synchronize(context));
    compare(&good, &t);
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    CHECK_OK(tch_optimizer_get_stats(t.optimizer, &stats));
    CHECK(stats.steps == 3 && stats.skipped == 1, "%lld steps, %lld skipped", (long long)stats.steps,
          (long long)stats.skipped);
    CHECK_CUDA(cudaGraphExecDestroy(graph));
    end(&good);
    end(&t);
    CHECK_OK(tch_context_set_stream(context, NULL));
    CHECK_CUDA(cudaStreamDestroy(stream));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_captured_and_replayed),
        cmocka_unit_test(a_replay_skips_a_bad_gradient),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
