/* Steps of optimizers and of KFAC on a GPU: captured in the caller's CUDA graph and replayed, recorded by the library,
 * and next to other uses of CUDA. Step counts and decisions are on the device, so a replay corrects bias and skips bad
 * gradients like a call. Results are bitwise equal to those of called steps.
 *
 * The weights of KFAC's averages are fixed in a graph, so they are constant here, without bias correction; and bases
 * are recomputed by calls only, since cuSOLVER's eigensolver synchronizes. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "support/cuda/graphs.h"
#include "support/optim/optim_defaults.h"

enum { PARAMETERS = 4, LAYERS = 3, SAMPLES = 24, MOST_TENSORS = 4 * LAYERS, WARM = 3, REPLAYS = 6 };
enum { ENOUGH = 6 }; /* steps before the library replays */

static tch_context *plain, *recording, *phased; /* the last with a graph for each phase */

static int open_contexts(void **state)
{
    setenv("TORCHIUM_CUDA_RECORD", "0", 1);
    CHECK_OK(tch_context_create(test_device(), &plain));
    setenv("TORCHIUM_CUDA_RECORD", "phases", 1);
    CHECK_OK(tch_context_create(test_device(), &phased));
    unsetenv("TORCHIUM_CUDA_RECORD");
    CHECK_OK(tch_context_create(test_device(), &recording));
    return 0;
}

static int close_contexts(void **state)
{
    tch_context_destroy(plain);
    tch_context_destroy(recording);
    tch_context_destroy(phased);
    return 0;
}

/* --- a training run ---------------------------------------------------------------------------------------------- */

/* Of an optimizer: random gradients for each step, resulting parameters. Of KFAC: random inputs of each layer and
 * gradients, resulting gradients. */
typedef struct training {
    tch_optimizer *optimizer;
    tch_kfac *kfac;
    bool refreshes; /* KFAC, in every step */
    int drawn_count, result_count, steps;
    test_tensor *drawn[MOST_TENSORS], *results[MOST_TENSORS];
} training;

static training begin_optimizer(tch_context *context, const tch_optim_config *config)
{
    static const int64_t shapes[PARAMETERS][2] = {{90, 70}, {70, 33}, {64, 64}, {77, 1}};
    training t = {.drawn_count = PARAMETERS, .result_count = PARAMETERS};
    tch_parameter list[PARAMETERS] = {{0}};
    for (int i = 0; i < PARAMETERS; i++) {
        t.results[i] = test_tensor_make(context, TCH_FLOAT32, 2, shapes[i], LAYOUT_CONTIGUOUS);
        t.drawn[i] = test_tensor_make(context, TCH_FLOAT32, 2, shapes[i], LAYOUT_CONTIGUOUS);
        test_tensor_draw(t.results[i], 10 + (uint64_t)i);
        list[i].tensor = &t.results[i]->tensor;
    }
    CHECK_OK(tch_optimizer_create(context, config, NULL, PARAMETERS, list, &t.optimizer));
    return t;
}

static training begin_kind(tch_context *context, tch_optim_kind kind)
{
    tch_optim_config config = test_optim_defaults(kind);
    config.lr = 0.01;
    config.shampoo.precondition_frequency = 1;
    return begin_optimizer(context, &config);
}

static training begin_kfac(tch_context *context, const tch_kfac_config *config)
{
    static const int64_t inputs[LAYERS] = {40, 33, 40};
    static const int64_t outputs[LAYERS] = {33, 20, 33};
    training t = {.refreshes = true, .result_count = 2 * LAYERS};
    tch_kfac_layer layers[LAYERS] = {0};
    for (int i = 0; i < LAYERS; i++) {
        const int64_t shapes[4][2] = {
            {SAMPLES, inputs[i]}, {SAMPLES, outputs[i]}, {outputs[i], inputs[i]}, {outputs[i]}};
        layers[i] = (tch_kfac_layer){TCH_LAYER_INIT(TCH_LAYER_LINEAR), inputs[i], outputs[i], 1, NULL};
        for (int k = 0; k < 4; k++) {
            t.drawn[t.drawn_count++] =
                test_tensor_make(context, TCH_FLOAT32, k < 3 ? 2 : 1, shapes[k], LAYOUT_CONTIGUOUS);
        }
        t.results[2 * i] = t.drawn[4 * i + 2];
        t.results[2 * i + 1] = t.drawn[4 * i + 3];
    }
    CHECK_OK(tch_kfac_create(context, config, NULL, LAYERS, layers, &t.kfac));
    return t;
}

static void end(training *t)
{
    for (int i = 0; i < t->drawn_count; i++) {
        test_tensor_free(t->drawn[i]);
    }
    for (int i = 0; i < t->result_count && t->optimizer != NULL; i++) {
        test_tensor_free(t->results[i]);
    }
    tch_optimizer_destroy(t->optimizer);
    tch_kfac_destroy(t->kfac);
}

/* Data of the next step. */
static void draw(training *t)
{
    for (int i = 0; i < t->drawn_count; i++) {
        test_tensor_draw(t->drawn[i], 100 + (uint64_t)(t->steps * t->drawn_count + i));
    }
    t->steps++;
}

/* With the current data. */
static tch_status step(const void *data)
{
    const training *t = data;
    const tch_tensor *drawn[MOST_TENSORS];
    tch_tensor *gradients[2 * LAYERS];
    for (int i = 0; i < t->drawn_count; i++) {
        drawn[i] = &t->drawn[i]->tensor;
    }
    if (t->optimizer != NULL) {
        return tch_optimizer_step(t->optimizer, PARAMETERS, drawn);
    }
    tch_status status = TCH_OK;
    for (int32_t i = 0; i < LAYERS && status == TCH_OK; i++) {
        status = tch_kfac_observe(t->kfac, i, drawn[4 * i], drawn[4 * i + 1], 1.0, NULL);
    }
    for (int i = 0; i < 2 * LAYERS; i++) {
        gradients[i] = &t->results[i]->tensor;
    }
    status = status == TCH_OK && t->refreshes ? tch_kfac_refresh(t->kfac) : status;
    return status == TCH_OK ? tch_kfac_precondition(t->kfac, 0.1, 2 * LAYERS, gradients) : status;
}

static void call_steps(training *t, int count)
{
    for (int i = 0; i < count; i++) {
        draw(t);
        CHECK_OK(step(t));
    }
}

/* All elements finite and bitwise equal. */
static void check_same(const training *called, const training *replayed)
{
    for (int i = 0; i < called->result_count; i++) {
        double *x = test_tensor_read(called->results[i]);
        double *y = test_tensor_read(replayed->results[i]);
        for (int64_t k = 0; k < called->results[i]->count; k++) {
            CHECK(x[k] == y[k] && isfinite(x[k]), "tensor %d, element %lld: %.9g by calls, %.9g by replays", i,
                  (long long)k, x[k], y[k]);
        }
    }
}

/* With steps of a non-recording optimizer. */
static void compare_with_plain(const training *t, tch_optim_kind kind)
{
    training other = begin_kind(plain, kind);
    call_steps(&other, t->steps);
    check_same(&other, t);
    end(&other);
}

static const tch_optim_kind kinds[] = {TCH_OPTIM_SOAP, TCH_OPTIM_SHAMPOO, TCH_OPTIM_MUON, TCH_OPTIM_NORMUON,
                                       TCH_OPTIM_KL_SHAMPOO};

/* --- the caller's graphs ----------------------------------------------------------------------------------------- */

/* Two equal runs on `stream`: one continues by calls, the other by replays of a captured step, without allocations. */
static void check_replays(cudaStream_t stream, training *called, training *replayed, bool refreshes)
{
    tch_memory_info before = TCH_MEMORY_INFO_INIT;
    tch_memory_info after = TCH_MEMORY_INFO_INIT;
    call_steps(called, WARM);
    call_steps(replayed, WARM);
    called->refreshes = replayed->refreshes = refreshes;
    CHECK_OK(tch_memory_get_info(recording, &before));
    cudaGraphExec_t graph = test_capture(stream, step, replayed);
    for (int i = 0; i < REPLAYS; i++) {
        call_steps(called, 1);
        draw(replayed);
        CHECK_CUDA(cudaGraphLaunch(graph, stream));
        if (called->kfac != NULL) { /* whose results depend on one step only */
            CHECK_OK(tch_context_synchronize(recording));
            check_same(called, replayed);
        }
    }
    CHECK_OK(tch_context_synchronize(recording));
    CHECK_OK(tch_memory_get_info(recording, &after));
    CHECK(called->kfac != NULL || after.misses == before.misses, "%lld allocations in the steady state",
          (long long)(after.misses - before.misses));
    check_same(called, replayed);
    end(called);
    end(replayed);
    test_leave_stream(recording, stream, graph);
}

static void check_optimizer(const tch_optim_config *config, const char *name)
{
    test_case("%s", name);
    cudaStream_t stream = test_enter_stream(recording);
    training called = begin_optimizer(recording, config);
    training replayed = begin_optimizer(recording, config);
    check_replays(stream, &called, &replayed, false);
}

TEST(optimizers_are_captured_and_replayed)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        tch_optim_config config = test_optim_defaults((tch_optim_kind)kind);
        config.lr = 0.01;
        config.momentum = kind == TCH_OPTIM_SGD ? 0.9 : config.momentum;
        config.shampoo.precondition_frequency = 1;
        config.shampoo.max_preconditioner_dim = kind == TCH_OPTIM_SHAMPOO ? 40 : config.shampoo.max_preconditioner_dim;
        for (int dtype = TCH_STATE_FLOAT32; dtype <= TCH_STATE_INT8; dtype++) {
            char name[64];
            config.memory.state_dtype = (tch_state_dtype)dtype;
            snprintf(name, sizeof name, "%s, state_dtype %d", tch_optim_kind_name(config.kind), dtype);
            check_optimizer(&config, name);
        }
    }
    tch_optim_config config = test_optim_defaults(TCH_OPTIM_SHAMPOO);
    config.shampoo.grafting = TCH_GRAFTING_ADAM;
    config.beta2 = 0.99;
    config.momentum = 0.5;
    config.shampoo.precondition_frequency = 100;
    config.shampoo.stagger = 0;
    check_optimizer(&config, "shampoo between refreshes");
}

TEST(kfac_is_captured_and_replayed)
{
    for (int method = 0; method < TCH_KFAC_METHOD_COUNT; method++) {
        tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
        config.method = (tch_kfac_method)method;
        config.use_bias_correction = 0;
        test_case("KFAC, method %d", method);
        cudaStream_t stream = test_enter_stream(recording);
        training called = begin_kfac(recording, &config);
        training replayed = begin_kfac(recording, &config);
        check_replays(stream, &called, &replayed, method == TCH_KFAC_INVERSE);
    }
}

/* The decision to skip is made on the device, inside the graph. */
TEST(a_replay_skips_a_bad_gradient)
{
    test_case("NaN in a replay");
    cudaStream_t stream = test_enter_stream(recording);
    tch_optim_config config = tch_optim_defaults(TCH_OPTIM_ADAMW);
    training good = begin_optimizer(recording, &config);
    training t = begin_optimizer(recording, &config);
    call_steps(&good, 1);
    call_steps(&t, 1);
    cudaGraphExec_t graph = test_capture(stream, step, &t);
    double *values = test_tensor_read(t.drawn[1]);
    values[5] = NAN;
    test_tensor_write(t.drawn[1], values);
    CHECK_CUDA(cudaGraphLaunch(graph, stream));
    draw(&t);
    CHECK_CUDA(cudaGraphLaunch(graph, stream));
    call_steps(&good, 1);
    CHECK_OK(tch_context_synchronize(recording));
    check_same(&good, &t);
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    CHECK_OK(tch_optimizer_get_stats(t.optimizer, &stats));
    CHECK(stats.steps == 3 && stats.skipped == 1, "%lld steps, %lld skipped", (long long)stats.steps,
          (long long)stats.skipped);
    end(&good);
    end(&t);
    test_leave_stream(recording, stream, graph);
}

/* The library's replays, a capture, the same graph twice, and calls again: the caller's graph contains work, not the
 * library's graphs. */
TEST(the_caller_captures_a_recorded_step)
{
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        test_case("%s", tch_optim_kind_name(kinds[k]));
        cudaStream_t stream = test_enter_stream(recording);
        training t = begin_kind(recording, kinds[k]);
        call_steps(&t, ENOUGH);
        CHECK_OK(tch_context_synchronize(recording));
        cudaGraphExec_t graph = test_capture(stream, step, &t);
        for (int i = 0; i < 2; i++) {
            draw(&t);
            CHECK_CUDA(cudaGraphLaunch(graph, stream));
        }
        call_steps(&t, 2);
        compare_with_plain(&t, kinds[k]);
        end(&t);
        test_leave_stream(recording, stream, graph);
    }
}

/* --- recordings -------------------------------------------------------------------------------------------------- */

TEST(a_graph_for_each_phase)
{
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        test_case("%s", tch_optim_kind_name(kinds[k]));
        training t = begin_kind(phased, kinds[k]);
        call_steps(&t, 2 * ENOUGH);
        compare_with_plain(&t, kinds[k]);
        end(&t);
    }
}

static atomic_int stop, captures, broken;

/* Begins and ends captures in the most restrictive mode for other threads. */
static void *capture_on_and_on(void *argument)
{
    cudaStream_t stream;
    void *memory = argument;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
        return NULL;
    }
    while (!atomic_load(&stop)) {
        cudaGraph_t graph = NULL;
        cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
        for (int i = 0; i < 20 && error == cudaSuccess; i++) {
            error = cudaMemsetAsync(memory, i, 1 << 16, stream);
        }
        cudaError_t ended = cudaStreamEndCapture(stream, &graph);
        atomic_fetch_add(&captures, 1);
        atomic_fetch_add(&broken, error != cudaSuccess || ended != cudaSuccess);
        if (graph != NULL) {
            cudaGraphDestroy(graph);
        }
    }
    cudaStreamDestroy(stream);
    return NULL;
}

/* Steps of an existing optimizer, including recordings, neither fail nor break captures of the other thread. */
TEST(another_thread_captures)
{
    test_case("another thread captures");
    pthread_t thread;
    void *memory = NULL;
    training t = begin_kind(recording, TCH_OPTIM_SOAP);
    call_steps(&t, 3); /* the next one records; all kernels are loaded, which another thread's capture could forbid */
    CHECK_CUDA(cudaMalloc(&memory, 1 << 16));
    CHECK_CUDA(cudaDeviceSynchronize());
    atomic_store(&stop, 0);
    CHECK(pthread_create(&thread, NULL, capture_on_and_on, memory) == 0, "no thread");
    for (int i = 0; i < 40; i++) { /* with the same gradients: writing others would synchronize */
        CHECK_OK(step(&t));
    }
    atomic_store(&stop, 1);
    CHECK(pthread_join(thread, NULL) == 0, "no end of a thread");
    CHECK(atomic_load(&captures) > 0, "no captures");
    CHECK(atomic_load(&broken) == 0, "%d of %d captures were broken", atomic_load(&broken), atomic_load(&captures));
    CHECK_OK(tch_context_synchronize(recording));
    end(&t);
    CHECK_CUDA(cudaFree(memory));
}

/* Nothing may be freed before the work completes; later device work must be unharmed. */
TEST(destroyed_while_running)
{
    test_case("destroyed while running");
    for (int i = 0; i < 5; i++) {
        training t = begin_kind(recording, TCH_OPTIM_SOAP);
        call_steps(&t, ENOUGH);
        CHECK_OK(step(&t));
        end(&t);
    }
    CHECK_OK(tch_context_synchronize(recording));
    training t = begin_kind(recording, TCH_OPTIM_SOAP);
    call_steps(&t, ENOUGH);
    compare_with_plain(&t, TCH_OPTIM_SOAP);
    end(&t);
}

TEST_MAIN(open_contexts, close_contexts)
