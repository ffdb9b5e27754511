/* The CUDA module's recorder on a runtime that only pretends (support/cuda/fake_runtime.h): on which streams work goes,
 * what is left when a capture fails, and when nothing is recorded. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cuda/cuda.h"

#include "support/cuda/fake_host.h"
#include "support/cuda/fake_runtime.h"
#include "support/testing.h"

/* A state on device 1, entered. */
static int open_state(void **state)
{
    fake_runtime_reset();
    fake_host.message[0] = '\0';
    return tchi_cuda_state_create(1, state) == TCH_OK && tchi_cuda_begin(*state) == TCH_OK ? 0 : -1;
}

static int close_state(void **state)
{
    tchi_cuda_end(*state);
    tchi_cuda_state_destroy(*state);
    bool clean = fake.allocated == 0 && fake.streams == 0 && fake.graphs == 0 && fake.executables == 0 &&
                 fake_host.bytes == 0 && fake.pending == cudaSuccess && fake.current == 0;
    return clean && fake.mode == cudaStreamCaptureModeGlobal ? 0 : -1;
}

static cudaStream_t stream_of(void *state)
{
    return tchi_cuda_get_stream(state);
}

/* --- recording --------------------------------------------------------------------------------------------------- */

static void record_and_replay(void *state, cudaStream_t stream)
{
    void *recording = NULL;
    assert_true(tchi_cuda_recording_possible(state));
    assert_int_equal(tchi_cuda_recording_begin(state), TCH_OK);
    assert_non_null(stream_of(state));
    assert_ptr_not_equal(stream_of(state), stream);
    assert_ptr_equal(stream_of(state), fake.captured);
    assert_int_equal(tchi_cuda_recording_end(state, &recording), TCH_OK);
    assert_non_null(recording);
    assert_ptr_equal(stream_of(state), stream);
    assert_null(fake.captured);
    assert_int_equal(fake.graphs, 0);
    assert_int_equal(tchi_cuda_recording_replay(state, recording), TCH_OK);
    assert_ptr_equal(fake.replayed_on, stream);
    tchi_cuda_recording_release(state, recording);
    assert_int_equal(fake.executables, 0);
}

static void work_goes_to_a_stream_of_its_own_and_back(void **state)
{
    record_and_replay(*state, stream_of(*state));
    int streams = fake.streams;
    record_and_replay(*state, stream_of(*state));
    assert_int_equal(fake.streams, streams); /* one is enough */
}

static void the_default_stream_will_do(void **state)
{
    assert_int_equal(tchi_cuda_set_stream(*state, NULL), TCH_OK);
    record_and_replay(*state, NULL);
}

static void nothing_is_allocated_or_waited_for(void **state)
{
    void *pointer = NULL;
    void *recording = NULL;
    assert_int_equal(tchi_cuda_recording_begin(*state), TCH_OK);
    assert_int_equal(tchi_cuda_allocate(*state, 100, &pointer), TCH_ERR_UNSUPPORTED);
    assert_int_equal(tchi_cuda_synchronize(*state), TCH_ERR_UNSUPPORTED);
    assert_int_equal(fake.bad_waits, 0);
    assert_false(tchi_cuda_recording_possible(*state));
    assert_int_equal(tchi_cuda_recording_end(*state, &recording), TCH_OK);
    tchi_cuda_recording_release(*state, recording);
}

static void a_release_enters_the_device_by_itself(void **state)
{
    void *recording = NULL;
    assert_int_equal(tchi_cuda_recording_begin(*state), TCH_OK);
    assert_int_equal(tchi_cuda_recording_end(*state, &recording), TCH_OK);
    tchi_cuda_end(*state);
    tchi_cuda_recording_release(*state, recording);
    assert_int_equal(fake.current, 0);
    assert_int_equal(tchi_cuda_begin(*state), TCH_OK);
}

/* --- what goes wrong --------------------------------------------------------------------------------------------- */

static void a_capture_that_does_not_begin(void **state)
{
    cudaStream_t stream = stream_of(*state);
    fake.capture_says = cudaErrorStreamCaptureUnsupported;
    assert_int_equal(tchi_cuda_recording_begin(*state), TCH_ERR_BACKEND);
    assert_ptr_equal(stream_of(*state), stream);
    assert_int_equal(fake.pending, cudaSuccess);
    fake.capture_says = cudaSuccess;
    record_and_replay(*state, stream);
}

static void check_nothing_kept(void *state)
{
    static char somewhere;
    void *recording = &somewhere;
    cudaStream_t stream = stream_of(state);
    assert_int_equal(tchi_cuda_recording_begin(state), TCH_OK);
    assert_int_equal(tchi_cuda_recording_end(state, &recording), TCH_OK);
    assert_null(recording);
    assert_ptr_equal(stream_of(state), stream);
    assert_int_equal(fake.pending, cudaSuccess);
    assert_int_equal(fake.graphs, 0);
}

static void a_capture_that_was_ended(void **state)
{
    fake.end_says = cudaErrorStreamCaptureInvalidated;
    check_nothing_kept(*state);
}

static void a_graph_that_cannot_be_made(void **state)
{
    fake.graph_says = cudaErrorMemoryAllocation;
    check_nothing_kept(*state);
}

static void a_replay_that_fails_is_reported_once(void **state)
{
    void *recording = NULL;
    assert_int_equal(tchi_cuda_recording_begin(*state), TCH_OK);
    assert_int_equal(tchi_cuda_recording_end(*state, &recording), TCH_OK);
    fake.replay_says = cudaErrorMemoryAllocation;
    assert_int_equal(tchi_cuda_recording_replay(*state, recording), TCH_ERR_OUT_OF_MEMORY);
    assert_int_equal(fake.pending, cudaSuccess);
    tchi_cuda_recording_release(*state, recording);
}

/* --- when nothing is recorded ------------------------------------------------------------------------------------ */

static void not_while_the_caller_captures(void **state)
{
    fake.captured = stream_of(*state);
    assert_false(tchi_cuda_recording_possible(*state));
    assert_int_equal(fake.pending, cudaSuccess);
    fake.captured = NULL;
    assert_true(tchi_cuda_recording_possible(*state));
}

static int is_possible_with(const char *variable, const char *value)
{
    void *state = NULL;
    fake_runtime_reset();
    setenv(variable, value, 1);
    assert_int_equal(tchi_cuda_state_create(0, &state), TCH_OK);
    unsetenv(variable);
    int possible = tchi_cuda_recording_possible(state);
    tchi_cuda_state_destroy(state);
    return possible;
}

static void not_where_the_environment_says_so(void **state)
{
    (void)state;
    assert_false(is_possible_with("TORCHIUM_CUDA_RECORD", "0"));
    assert_true(is_possible_with("TORCHIUM_CUDA_RECORD", "1"));
    assert_false(is_possible_with("TORCHIUM_DEBUG_SYNC", "1"));
    assert_true(is_possible_with("TORCHIUM_DEBUG_SYNC", "0"));
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, open_state, close_state)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(work_goes_to_a_stream_of_its_own_and_back),
        CASE(the_default_stream_will_do),
        CASE(nothing_is_allocated_or_waited_for),
        CASE(a_release_enters_the_device_by_itself),
        CASE(a_capture_that_does_not_begin),
        CASE(a_capture_that_was_ended),
        CASE(a_graph_that_cannot_be_made),
        CASE(a_replay_that_fails_is_reported_once),
        CASE(not_while_the_caller_captures),
        cmocka_unit_test(not_where_the_environment_says_so),
    };
    setenv("TORCHIUM_CUBLAS", FAKE_CUBLAS, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
