/* Recorded steps on a GPU beside other uses of CUDA: a capture of the caller's own after steps were replayed, captures
 * by other threads meanwhile, and optimizers destroyed while their work is running.
 * What the steps compute is compared, to the bit, with an optimizer on a context that does not record. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "support/cuda/graphs.h"
#include "support/optim/optim_defaults.h"

enum { ENOUGH = 6 };

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

static test_training begin(tch_context *context, tch_optim_kind kind)
{
    tch_optim_config config = test_optim_defaults(kind);
    config.lr = 0.01;
    config.precondition_frequency = 1;
    return test_training_begin(context, &config);
}

static void steps(test_training *t, int count)
{
    for (int i = 0; i < count; i++) {
        test_training_draw(t);
        CHECK_OK(test_training_step(t));
    }
}

/* With steps of an optimizer that does not record. */
static void compare(const test_training *t, tch_optim_kind kind)
{
    test_training other = begin(plain, kind);
    steps(&other, t->steps);
    test_check_same(TEST_PARAMETERS, other.parameter, t->parameter);
    test_training_end(&other);
}

static const tch_optim_kind kinds[] = {TCH_OPTIM_SOAP, TCH_OPTIM_SHAMPOO, TCH_OPTIM_MUON, TCH_OPTIM_NORMUON};
enum { KINDS = 4 };

/* --- the caller captures ----------------------------------------------------------------------------------------- */

/* Replays, a capture, the same graph twice, and calls again: what the caller's graph holds is work, not ours. */
static void the_caller_captures_a_step(void **state)
{
    for (int k = 0; k < KINDS; k++) {
        test_case("%s", tch_optim_kind_name(kinds[k]));
        cudaStream_t stream = test_enter_stream(recording);
        test_training t = begin(recording, kinds[k]);
        steps(&t, ENOUGH);
        CHECK_OK(tch_context_synchronize(recording));
        cudaGraphExec_t graph = test_capture(stream, test_training_step, &t);
        for (int i = 0; i < 2; i++) {
            test_training_draw(&t);
            CHECK_CUDA(cudaGraphLaunch(graph, stream));
        }
        steps(&t, 2);
        compare(&t, kinds[k]);
        test_training_end(&t);
        test_leave_stream(recording, stream, graph);
    }
}

/* --- phases ------------------------------------------------------------------------------------------------------ */

static void a_graph_for_each_phase(void **state)
{
    for (int k = 0; k < KINDS; k++) {
        test_case("%s", tch_optim_kind_name(kinds[k]));
        test_training t = begin(phased, kinds[k]);
        steps(&t, 2 * ENOUGH);
        compare(&t, kinds[k]);
        test_training_end(&t);
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
    test_case("another thread captures");
    pthread_t thread;
    void *memory = NULL;
    test_training t = begin(recording, TCH_OPTIM_SOAP);
    steps(&t, 3); /* the next one records; all kernels are loaded, which a capture elsewhere could forbid */
    CHECK_CUDA(cudaMalloc(&memory, 1 << 16));
    CHECK_CUDA(cudaDeviceSynchronize());
    atomic_store(&stop, 0);
    CHECK(pthread_create(&thread, NULL, capture_on_and_on, memory) == 0, "no thread");
    for (int i = 0; i < 40; i++) { /* with the same gradients: writing others waits for the device */
        CHECK_OK(test_training_step(&t));
    }
    atomic_store(&stop, 1);
    CHECK(pthread_join(thread, NULL) == 0, "no end of a thread");
    CHECK(atomic_load(&captures) > 0, "no captures");
    CHECK(atomic_load(&broken) == 0, "%d of %d captures were broken", atomic_load(&broken), atomic_load(&captures));
    CHECK_OK(tch_context_synchronize(recording));
    test_training_end(&t);
    CHECK_CUDA(cudaFree(memory));
}

/* --- the end ------------------------------------------------------------------------------------------------------ */

/* Nothing of it may be freed before it is done; what follows on the device must be unharmed. */
static void destroyed_while_running(void **state)
{
    test_case("destroyed while running");
    for (int i = 0; i < 5; i++) {
        test_training t = begin(recording, TCH_OPTIM_SOAP);
        steps(&t, ENOUGH);
        CHECK_OK(test_training_step(&t));
        test_training_end(&t);
    }
    CHECK_OK(tch_context_synchronize(recording));
    test_training t = begin(recording, TCH_OPTIM_SOAP);
    steps(&t, ENOUGH);
    compare(&t, TCH_OPTIM_SOAP);
    test_training_end(&t);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_caller_captures_a_step),
        cmocka_unit_test(a_graph_for_each_phase),
        cmocka_unit_test(another_thread_captures),
        cmocka_unit_test(destroyed_while_running),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
