/* Recorded steps on a GPU beside other uses of CUDA: a capture of the caller's own after steps were replayed, captures
 * by other threads meanwhile, contexts on the default stream, and optimizers destroyed while their work is running.
 * What the steps compute is compared, to the bit, with an optimizer on a context that does not record. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "support/optim/optim_defaults.h"
#include "support/tensors.h"
#include "support/testing.h"

#define CHECK_CUDA(call)                                                                                               \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        CHECK(error_ == cudaSuccess, "%s gave %s", #call, cudaGetErrorString(error_));                                 \
    } while (0)

enum { PARAMETERS = 4, ENOUGH = 6 };

static const int64_t shapes[PARAMETERS][2] = {{90, 70}, {70, 33}, {64, 64}, {77, 1}};

typedef struct training {
    tch_context *context;
    tch_optimizer *optimizer;
    test_tensor *parameter[PARAMETERS], *gradient[PARAMETERS];
    const tch_tensor *gradients[PARAMETERS];
    int steps;
} training;

static tch_context *plain, *recording, *phased; /* the last with a graph for each phase */

static int open_contexts(void **state)
{
    (void)state;
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
    (void)state;
    tch_context_destroy(plain);
    tch_context_destroy(recording);
    tch_context_destroy(phased);
    return 0;
}

static training begin(tch_context *context, tch_optim_kind kind)
{
    training t = {.context = context};
    tch_parameter list[PARAMETERS] = {{0}};
    tch_optim_config config = test_optim_defaults(kind);
    config.lr = 0.01;
    config.precondition_frequency = 1;
    for (int i = 0; i < PARAMETERS; i++) {
        t.parameter[i] = test_tensor_make(context, TCH_FLOAT32, 2, shapes[i], LAYOUT_CONTIGUOUS);
        t.gradient[i] = test_tensor_make(context, TCH_FLOAT32, 2, shapes[i], LAYOUT_CONTIGUOUS);
        test_tensor_draw(t.parameter[i], 10 + (uint64_t)i);
        list[i].tensor = &t.parameter[i]->tensor;
        t.gradients[i] = &t.gradient[i]->tensor;
    }
    CHECK_OK(tch_optimizer_create(context, &config, PARAMETERS, list, &t.optimizer));
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

static void set_gradients(training *t)
{
    for (int i = 0; i < PARAMETERS; i++) {
        test_tensor_draw(t->gradient[i], 100 + (uint64_t)(t->steps * PARAMETERS + i));
    }
    t->steps++;
}

static void step(training *t)
{
    set_gradients(t);
    CHECK_OK(tch_optimizer_step(t->optimizer, PARAMETERS, t->gradients));
}

static void steps(training *t, int count)
{
    for (int i = 0; i < count; i++) {
        step(t);
    }
}

/* With steps of an optimizer that does not record. */
static void compare(const training *t, tch_optim_kind kind)
{
    training other = begin(plain, kind);
    steps(&other, t->steps);
    for (int i = 0; i < PARAMETERS; i++) {
        double *x = test_tensor_read(other.parameter[i]);
        double *y = test_tensor_read(t->parameter[i]);
        for (int64_t k = 0; k < other.parameter[i]->count; k++) {
            CHECK(x[k] == y[k] && isfinite(x[k]), "parameter %d, element %lld: %.9g, and recorded %.9g", i,
                  (long long)k, x[k], y[k]);
        }
    }
    end(&other);
}

static const tch_optim_kind kinds[] = {TCH_OPTIM_SOAP, TCH_OPTIM_SHAMPOO, TCH_OPTIM_MUON, TCH_OPTIM_NORMUON};
enum { KINDS = 4 };

/* --- the caller captures ----------------------------------------------------------------------------------------- */

/* Replays, a capture, the same graph twice, and calls again: what the caller's graph holds is work, not ours. */
static void the_caller_captures_a_step(void **state)
{
    (void)state;
    for (int k = 0; k < KINDS; k++) {
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        test_case("%s", tch_optim_kind_name(kinds[k]));
        CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK_OK(tch_context_set_stream(recording, stream));
        training t = begin(recording, kinds[k]);
        steps(&t, ENOUGH);
        CHECK_OK(tch_context_synchronize(recording));
        CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        tch_status status = tch_optimizer_step(t.optimizer, PARAMETERS, t.gradients);
        cudaError_t ended = cudaStreamEndCapture(stream, &graph);
        CHECK(status == TCH_OK && ended == cudaSuccess, "%s, %s", tch_status_name(status), cudaGetErrorString(ended));
        CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
        for (int i = 0; i < 2; i++) {
            set_gradients(&t);
            CHECK_CUDA(cudaGraphLaunch(executable, stream));
        }
        steps(&t, 2);
        compare(&t, kinds[k]);
        CHECK_CUDA(cudaGraphExecDestroy(executable));
        CHECK_CUDA(cudaGraphDestroy(graph));
        end(&t);
        CHECK_OK(tch_context_set_stream(recording, NULL));
        CHECK_CUDA(cudaStreamDestroy(stream));
    }
}

/* --- phases ------------------------------------------------------------------------------------------------------ */

static void a_graph_for_each_phase(void **state)
{
    (void)state;
    for (int k = 0; k < KINDS; k++) {
        test_case("%s", tch_optim_kind_name(kinds[k]));
        training t = begin(phased, kinds[k]);
        steps(&t, 2 * ENOUGH);
        compare(&t, kinds[k]);
        end(&t);
    }
}

/* --- other threads capture --------------------------------------------------------------------------------------- */

static atomic_int stop, captures, broken;

/* Captures and ends, in the mode that forbids most to others. */
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

/* Steps of an optimizer that is there, recordings included, neither fail nor break what the other thread does. */
static void another_thread_captures(void **state)
{
    (void)state;
    test_case("another thread captures");
    pthread_t thread;
    void *memory = NULL;
    training t = begin(recording, TCH_OPTIM_SOAP);
    steps(&t, 3); /* the next one records; all kernels are loaded, which a capture elsewhere could forbid */
    CHECK_CUDA(cudaMalloc(&memory, 1 << 16));
    CHECK_CUDA(cudaDeviceSynchronize());
    atomic_store(&stop, 0);
    CHECK(pthread_create(&thread, NULL, capture_on_and_on, memory) == 0, "no thread");
    for (int i = 0; i < 40; i++) { /* with the same gradients: writing others waits for the device */
        CHECK_OK(tch_optimizer_step(t.optimizer, PARAMETERS, t.gradients));
    }
    atomic_store(&stop, 1);
    CHECK(pthread_join(thread, NULL) == 0, "no end of a thread");
    CHECK(atomic_load(&captures) > 0, "no captures");
    CHECK(atomic_load(&broken) == 0, "%d of %d captures were broken", atomic_load(&broken), atomic_load(&captures));
    CHECK_OK(tch_context_synchronize(recording));
    end(&t);
    CHECK_CUDA(cudaFree(memory));
}

/* --- streams, and the end ---------------------------------------------------------------------------------------- */

static void on_the_default_stream(void **state)
{
    (void)state;
    for (int k = 0; k < KINDS; k++) {
        test_case("%s on the default stream", tch_optim_kind_name(kinds[k]));
        CHECK_OK(tch_context_set_stream(recording, NULL));
        training t = begin(recording, kinds[k]);
        steps(&t, ENOUGH);
        compare(&t, kinds[k]);
        end(&t);
    }
}

/* Nothing of it may be freed before it is done; what follows on the device must be unharmed. */
static void destroyed_while_running(void **state)
{
    (void)state;
    test_case("destroyed while running");
    for (int i = 0; i < 5; i++) {
        training t = begin(recording, TCH_OPTIM_SOAP);
        steps(&t, ENOUGH);
        CHECK_OK(tch_optimizer_step(t.optimizer, PARAMETERS, t.gradients));
        end(&t);
    }
    CHECK_OK(tch_context_synchronize(recording));
    training t = begin(recording, TCH_OPTIM_SOAP);
    steps(&t, ENOUGH);
    compare(&t, TCH_OPTIM_SOAP);
    end(&t);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_caller_captures_a_step), cmocka_unit_test(a_graph_for_each_phase),
        cmocka_unit_test(another_thread_captures),    cmocka_unit_test(on_the_default_stream),
        cmocka_unit_test(destroyed_while_running),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
