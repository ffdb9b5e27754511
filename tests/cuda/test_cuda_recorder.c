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
    void *stream = NULL;
    assert_int_equal(tchi_cuda_stream(state, 0, &stream), TCH_OK);
    return stream;
}

static int64_t kernels; /* of the latest recording */

/* --- recording --------------------------------------------------------------------------------------------------- */

static bool can_record(void *state)
{
    return tchi_cuda_recording_bytes(state, 0) >= 0;
}

static tch_status no_work(void *state)
{
    assert_non_null(stream_of(state));
    assert_ptr_equal(stream_of(state), fake.captured);
    return TCH_OK;
}

static void *record(void *state, tch_status (*work)(void *state))
{
    static char somewhere;
    void *recording = &somewhere;
    cudaStream_t stream = stream_of(state);
    assert_int_equal(tchi_cuda_recording_record(state, work, state, &recording, &kernels), TCH_OK);
    assert_ptr_equal(stream_of(state), stream);
    assert_int_equal(fake.graphs, 0);
    return recording;
}

static void record_and_replay(void *state, cudaStream_t stream)
{
    assert_true(can_record(state));
    void *recording = record(state, no_work);
    assert_non_null(recording);
    assert_ptr_equal(stream_of(state), stream);
    assert_null(fake.captured);
    int32_t begun = 0;
    assert_int_equal(tchi_cuda_recording_replay(state, recording, &begun), TCH_OK);
    assert_int_equal(begun, 1);
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

/* In whole steps of 2 MiB; for as many kernels as were measured what was measured. */
static void bytes_are_an_estimate(void **state)
{
    assert_int_equal(tchi_cuda_recording_bytes(*state, 0), 0);
    assert_int_equal(tchi_cuda_recording_bytes(*state, 1), 2 << 20);
    assert_int_equal(tchi_cuda_recording_bytes(*state, 1448), 4 << 20);
    assert_int_equal(tchi_cuda_recording_bytes(*state, 1449), 6 << 20);
}

static void the_default_stream_will_do(void **state)
{
    void *none = NULL;
    assert_int_equal(tchi_cuda_stream(*state, 1, &none), TCH_OK);
    record_and_replay(*state, NULL);
}

static tch_status allocate_and_wait(void *state)
{
    void *pointer = NULL;
    assert_int_equal(tchi_cuda_allocate(state, 100, &pointer), TCH_ERR_UNSUPPORTED);
    assert_int_equal(tchi_cuda_synchronize(state), TCH_ERR_UNSUPPORTED);
    assert_int_equal(fake.bad_waits, 0);
    assert_false(can_record(state));
    return TCH_OK;
}

static void nothing_is_allocated_or_waited_for(void **state)
{
    tchi_cuda_recording_release(*state, record(*state, allocate_and_wait));
}

static void a_release_enters_the_device_by_itself(void **state)
{
    void *recording = record(*state, no_work);
    tchi_cuda_end(*state);
    tchi_cuda_recording_release(*state, recording);
    assert_int_equal(fake.current, 0);
    assert_int_equal(tchi_cuda_begin(*state), TCH_OK);
}

/* --- what goes wrong --------------------------------------------------------------------------------------------- */

static void a_capture_that_does_not_begin(void **state)
{
    fake.capture_says = cudaErrorStreamCaptureUnsupported;
    assert_null(record(*state, no_work)); /* which would fail: nothing is captured */
    assert_int_equal(fake.pending, cudaSuccess);
    fake.capture_says = cudaSuccess;
    record_and_replay(*state, stream_of(*state));
}

static void check_nothing_kept(void *state)
{
    assert_null(record(state, no_work));
    assert_int_equal(fake.pending, cudaSuccess);
}

static tch_status fail(void *state)
{
    (void)state;
    return TCH_ERR_UNSUPPORTED;
}

static void work_that_fails(void **state)
{
    assert_null(record(*state, fail));
    assert_int_equal(fake.executables, 0);
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
    void *recording = record(*state, no_work);
    fake.replay_says = cudaErrorMemoryAllocation;
    int32_t begun = 0;
    assert_int_equal(tchi_cuda_recording_replay(*state, recording, &begun), TCH_ERR_OUT_OF_MEMORY);
    assert_int_equal(begun, 0);
    assert_int_equal(fake.pending, cudaSuccess);
    tchi_cuda_recording_release(*state, recording);
}

/* --- phases ------------------------------------------------------------------------------------------------------ */

/* Work in two ranges, of which the second is in a third, and some behind them; with nothing before the first. */
static tch_status queue_ranges(void *state)
{
    fake.nodes = 0;
    tchi_cuda_recording_range(state, "factors");
    fake.nodes = 3;
    tchi_cuda_recording_range(state, NULL);
    fake.nodes = 0;
    tchi_cuda_recording_range(state, "refresh");
    tchi_cuda_recording_range(state, "root");
    fake.nodes = 2;
    tchi_cuda_recording_range(state, NULL);
    tchi_cuda_recording_range(state, NULL);
    assert_ptr_equal(stream_of(state), fake.captured);
    assert_null(fake.captured_too);
    return TCH_OK;
}

static const char *const by_phases =
    "push factors, launch, pop, push refresh, push root, launch, pop, launch, pop, launch, ";

static void with_phases(void *state)
{
    ((tchi_cuda_state *)state)->recorder.phases = 1;
}

static void each_phase_is_a_graph_in_its_range(void **state)
{
    int32_t begun = 0;
    with_phases(*state);
    void *recording = record(*state, queue_ranges);
    assert_non_null(recording);
    assert_int_equal(fake.executables, 4);
    assert_int_equal(kernels, 3 + 2 + 2 + 2);
    assert_int_equal(tchi_cuda_recording_replay(*state, recording, &begun), TCH_OK);
    assert_string_equal(fake.timeline, by_phases);
    tchi_cuda_recording_release(*state, recording);
    record_and_replay(*state, stream_of(*state)); /* on the streams there are */
}

static void without_a_profiler_it_is_one_graph(void **state)
{
    int32_t begun = 0;
    void *recording = record(*state, queue_ranges);
    assert_int_equal(tchi_cuda_recording_replay(*state, recording, &begun), TCH_OK);
    assert_string_equal(fake.timeline, "launch, ");
    tchi_cuda_recording_release(*state, recording);
}

/* Nothing is done meanwhile: what is queued stays where the capture is. */
static tch_status queue_where_no_phase_begins(void *state)
{
    fake.capture_says = cudaErrorStreamCaptureUnsupported;
    tchi_cuda_recording_range(state, "factors");
    assert_ptr_equal(stream_of(state), fake.captured);
    assert_int_equal(fake.pending, cudaSuccess);
    fake.capture_says = cudaSuccess;
    tchi_cuda_recording_range(state, NULL);
    fake.nodes = 0;
    return TCH_OK;
}

static void a_phase_that_cannot_begin_stays_with_the_one_before(void **state)
{
    int32_t begun = 0;
    with_phases(*state);
    void *recording = record(*state, queue_where_no_phase_begins);
    assert_int_equal(tchi_cuda_recording_replay(*state, recording, &begun), TCH_OK);
    assert_string_equal(fake.timeline, "push factors, launch, pop, ");
    tchi_cuda_recording_release(*state, recording);
}

static tch_status queue_where_a_phase_is_ended(void *state)
{
    fake.end_says = cudaErrorStreamCaptureInvalidated;
    tchi_cuda_recording_range(state, "factors");
    fake.end_says = cudaSuccess;
    tchi_cuda_recording_range(state, NULL);
    return TCH_OK;
}

static void a_phase_that_was_ended_leaves_no_recording(void **state)
{
    with_phases(*state);
    assert_null(record(*state, queue_where_a_phase_is_ended));
    assert_int_equal(fake.executables, 0);
}

/* The ranges that were opened are closed. */
static void a_replay_that_fails_in_the_middle_says_so(void **state)
{
    int32_t begun = 0;
    with_phases(*state);
    void *recording = record(*state, queue_ranges);
    fake.replay_says = cudaErrorMemoryAllocation;
    fake.replays_before = 1;
    assert_int_equal(tchi_cuda_recording_replay(*state, recording, &begun), TCH_ERR_OUT_OF_MEMORY);
    assert_int_equal(begun, 1);
    assert_string_equal(fake.timeline, "push factors, launch, pop, push refresh, push root, pop, pop, ");
    tchi_cuda_recording_release(*state, recording);
}

/* For every allocation that may fail nothing is kept, and nothing is left. */
static void no_memory_for_a_recording(void **state)
{
    with_phases(*state);
    for (int left = 0; left < 4; left++) {
        fake_host.allocations_left = left;
        void *recording = record(*state, queue_ranges);
        fake_host.allocations_left = -1;
        assert_null(recording);
        assert_int_equal(fake.executables, 0);
    }
}

/* --- when nothing is recorded ------------------------------------------------------------------------------------ */

static void not_while_the_caller_captures(void **state)
{
    fake.captured = stream_of(*state);
    assert_false(can_record(*state));
    assert_int_equal(fake.pending, cudaSuccess);
    fake.captured = NULL;
    assert_true(can_record(*state));
}

static int is_possible_with(const char *variable, const char *value)
{
    void *state = NULL;
    fake_runtime_reset();
    setenv(variable, value, 1);
    assert_int_equal(tchi_cuda_state_create(0, &state), TCH_OK);
    unsetenv(variable);
    int possible = can_record(state);
    tchi_cuda_state_destroy(state);
    return possible;
}

static int has_phases_with(const char *value, int heard)
{
    void *state = NULL;
    fake_runtime_reset();
    fake.heard = heard;
    setenv("TORCHIUM_CUDA_RECORD", value, 1);
    assert_int_equal(tchi_cuda_state_create(0, &state), TCH_OK);
    unsetenv("TORCHIUM_CUDA_RECORD");
    int phases = ((tchi_cuda_state *)state)->recorder.phases;
    tchi_cuda_state_destroy(state);
    return phases;
}

static void phases_where_a_profiler_listens(void **state)
{
    (void)state;
    assert_false(has_phases_with("", 0));
    assert_true(has_phases_with("", 1));
    assert_true(has_phases_with("phases", 0));
    assert_false(has_phases_with("whole", 1));
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
        CASE(bytes_are_an_estimate),
        CASE(nothing_is_allocated_or_waited_for),
        CASE(a_release_enters_the_device_by_itself),
        CASE(a_capture_that_does_not_begin),
        CASE(a_capture_that_was_ended),
        CASE(a_graph_that_cannot_be_made),
        CASE(work_that_fails),
        CASE(a_replay_that_fails_is_reported_once),
        CASE(each_phase_is_a_graph_in_its_range),
        CASE(without_a_profiler_it_is_one_graph),
        CASE(a_phase_that_cannot_begin_stays_with_the_one_before),
        CASE(a_phase_that_was_ended_leaves_no_recording),
        CASE(a_replay_that_fails_in_the_middle_says_so),
        CASE(no_memory_for_a_recording),
        cmocka_unit_test(phases_where_a_profiler_listens),
        CASE(not_while_the_caller_captures),
        cmocka_unit_test(not_where_the_environment_says_so),
    };
    setenv("TORCHIUM_CUBLAS", FAKE_CUBLAS, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
