/* The CUDA module's recorder on the emulated device: streams used, cleanup after a failed capture, and when nothing is
 * recorded. */
#define _GNU_SOURCE
#include <limits.h>

#include "backends/cuda/cuda.h"

#include "emulator/host/fake_host.h"
#include "support/testing.h"

static int open_state(void **state)
{
    return fake_host_open(state) == 0 && tchi_cuda_begin(*state) == TCH_OK ? 0 : -1;
}

static int close_state(void **state)
{
    tchi_cuda_end(*state);
    return fake_host_close(state);
}

static int is_captured(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

static int64_t kernels; /* of the latest recording */

/* Work visible outside: none before a replay. */
static unsigned char written[8];

static void queue_work(void *state, int count)
{
    for (int i = 0; i < count; i++) {
        assert_int_equal(tchi_cuda_zero_bytes(state, written + i, 1), TCH_OK);
    }
}

static void check_written(int count)
{
    for (int i = 0; i < (int)sizeof written; i++) {
        assert_int_equal(written[i], i < count ? 0 : 0xFF);
    }
}

static bool can_record(void *state)
{
    return tchi_cuda_recording_bytes(state, 0) >= 0;
}

/* NULL on failure; in any case the context is back on its stream and no graph is left. */
static void *record(void *state, tch_status (*work)(void *state))
{
    static char somewhere;
    void *recording = &somewhere;
    cudaStream_t stream = fake_host_stream(state);
    memset(written, 0xFF, sizeof written);
    assert_int_equal(tchi_cuda_recording_record(state, work, state, &recording, &kernels), TCH_OK);
    assert_ptr_equal(fake_host_stream(state), stream);
    assert_int_equal(emulated.graphs, 0);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    check_written(0);
    return recording;
}

static void check_replay(void *state, void *recording, const char *timeline)
{
    int32_t begun = 0;
    emulated.timeline[0] = '\0';
    assert_int_equal(tchi_cuda_recording_replay(state, recording, &begun), TCH_OK);
    assert_int_equal(begun, 1);
    assert_string_equal(emulated.timeline, timeline);
    assert_ptr_equal(emulated.replayed_on, fake_host_stream(state));
    tchi_cuda_recording_release(state, recording);
}

/* --- recording --------------------------------------------------------------------------------------------------- */

enum { WORK = 5 };

static tch_status queue_some_work(void *state)
{
    assert_non_null(fake_host_stream(state));
    assert_true(is_captured(fake_host_stream(state)));
    queue_work(state, WORK);
    return TCH_OK;
}

static void record_and_replay(void *state, cudaStream_t stream)
{
    assert_true(can_record(state));
    void *recording = record(state, queue_some_work);
    assert_non_null(recording);
    assert_ptr_equal(fake_host_stream(state), stream);
    assert_false(is_captured(stream));
    assert_int_equal(kernels, WORK);
    check_replay(state, recording, "launch, ");
    check_written(WORK);
    assert_int_equal(emulated.executables, 0);
}

TEST_WITH(work_goes_to_a_stream_of_its_own_and_back, open_state, close_state)
{
    record_and_replay(*state, fake_host_stream(*state));
    int streams = emulated.streams;
    record_and_replay(*state, fake_host_stream(*state));
    assert_int_equal(emulated.streams, streams); /* one is enough */
}

/* In multiples of 2 MiB; for the measured number of kernels, the measured value. */
TEST_WITH(bytes_are_an_estimate, open_state, close_state)
{
    assert_int_equal(tchi_cuda_recording_bytes(*state, 0), 0);
    assert_int_equal(tchi_cuda_recording_bytes(*state, 1), 2 << 20);
    assert_int_equal(tchi_cuda_recording_bytes(*state, 1448), 4 << 20);
    assert_int_equal(tchi_cuda_recording_bytes(*state, 1449), 6 << 20);
}

TEST_WITH(the_default_stream_will_do, open_state, close_state)
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
    assert_false(can_record(state));
    return TCH_OK;
}

TEST_WITH(nothing_is_allocated_or_waited_for, open_state, close_state)
{
    void *recording = record(*state, allocate_and_wait);
    assert_non_null(recording); /* nothing has invalidated the capture */
    tchi_cuda_recording_release(*state, recording);
}

TEST_WITH(a_release_enters_the_device_by_itself, open_state, close_state)
{
    int device = -1;
    void *recording = record(*state, queue_some_work);
    tchi_cuda_end(*state);
    tchi_cuda_recording_release(*state, recording);
    assert_int_equal(cudaGetDevice(&device), cudaSuccess);
    assert_int_equal(device, 0);
    assert_int_equal(tchi_cuda_begin(*state), TCH_OK);
}

/* --- failures ---------------------------------------------------------------------------------------------------- */

TEST_WITH(a_capture_that_does_not_begin, open_state, close_state)
{
    emulated.fault = (emulator_fault){"cudaStreamBeginCapture", cudaErrorStreamCaptureUnsupported, 0, 1};
    assert_null(record(*state, queue_some_work)); /* which would fail: nothing is captured */
    record_and_replay(*state, fake_host_stream(*state));
}

static tch_status fail_to_work(void *state)
{
    queue_work(state, 1);
    return TCH_ERR_UNSUPPORTED;
}

TEST_WITH(work_that_fails, open_state, close_state)
{
    assert_null(record(*state, fail_to_work));
    assert_int_equal(emulated.executables, 0);
}

/* An invalidated capture, and a graph that cannot be instantiated. */
TEST_WITH(what_cannot_be_recorded_leaves_nothing, open_state, close_state)
{
    static const emulator_fault faults[] = {{"cudaStreamEndCapture", cudaErrorStreamCaptureInvalidated, 0, INT_MAX},
                                            {"cudaGraphInstantiate", cudaErrorMemoryAllocation, 0, INT_MAX}};
    for (int i = 0; i < 2; i++) {
        emulated.fault = faults[i];
        assert_null(record(*state, queue_some_work));
    }
}

TEST_WITH(a_replay_that_fails_is_reported_once, open_state, close_state)
{
    int32_t begun = 0;
    void *recording = record(*state, queue_some_work);
    emulated.fault = (emulator_fault){"cudaGraphLaunch", cudaErrorMemoryAllocation, 0, INT_MAX};
    assert_int_equal(tchi_cuda_recording_replay(*state, recording, &begun), TCH_ERR_OUT_OF_MEMORY);
    assert_int_equal(begun, 0);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    tchi_cuda_recording_release(*state, recording);
}

/* --- phases ------------------------------------------------------------------------------------------------------ */

/* Work in two ranges, the second nested in a third, and some after them; none before the first. */
static tch_status queue_ranges(void *state)
{
    tchi_cuda_recording_range(state, "factors");
    queue_work(state, 3);
    tchi_cuda_recording_range(state, NULL);
    tchi_cuda_recording_range(state, "refresh");
    tchi_cuda_recording_range(state, "root");
    queue_work(state, 2);
    tchi_cuda_recording_range(state, NULL);
    queue_work(state, 2);
    tchi_cuda_recording_range(state, NULL);
    queue_work(state, 2);
    assert_true(is_captured(fake_host_stream(state)));
    return TCH_OK;
}

static void with_phases(void *state)
{
    ((tchi_cuda_state *)state)->recorder.phases = 1;
}

TEST_WITH(each_phase_is_a_graph_in_its_range, open_state, close_state)
{
    with_phases(*state);
    void *recording = record(*state, queue_ranges);
    assert_non_null(recording);
    assert_int_equal(emulated.executables, 4);
    assert_int_equal(kernels, 3 + 2 + 2 + 2);
    check_replay(*state, recording,
                 "push factors, launch, pop, push refresh, push root, launch, pop, launch, pop, launch, ");
    record_and_replay(*state, fake_host_stream(*state)); /* on existing streams */
}

TEST_WITH(without_a_profiler_it_is_one_graph, open_state, close_state)
{
    check_replay(*state, record(*state, queue_ranges), "launch, ");
}

static tch_status queue_range_without_capture(void *state)
{
    emulated.fault = (emulator_fault){"cudaStreamBeginCapture", cudaErrorStreamCaptureUnsupported, 0, 1};
    tchi_cuda_recording_range(state, "factors");
    assert_true(is_captured(fake_host_stream(state)));
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    queue_work(state, 1);
    tchi_cuda_recording_range(state, NULL);
    return TCH_OK;
}

/* Nothing runs meanwhile: work stays in the capture. */
TEST_WITH(a_phase_that_cannot_begin_stays_with_the_one_before, open_state, close_state)
{
    with_phases(*state);
    check_replay(*state, record(*state, queue_range_without_capture), "push factors, launch, pop, ");
    check_written(1);
}

static tch_status queue_ended_range(void *state)
{
    emulated.fault = (emulator_fault){"cudaStreamEndCapture", cudaErrorStreamCaptureInvalidated, 0, 1};
    tchi_cuda_recording_range(state, "factors");
    tchi_cuda_recording_range(state, NULL);
    return TCH_OK;
}

TEST_WITH(a_phase_that_was_ended_leaves_no_recording, open_state, close_state)
{
    with_phases(*state);
    assert_null(record(*state, queue_ended_range));
    assert_int_equal(emulated.executables, 0);
}

/* Open ranges are closed. */
TEST_WITH(a_replay_that_fails_in_the_middle_says_so, open_state, close_state)
{
    int32_t begun = 0;
    with_phases(*state);
    void *recording = record(*state, queue_ranges);
    emulated.fault = (emulator_fault){"cudaGraphLaunch", cudaErrorMemoryAllocation, 1, INT_MAX};
    assert_int_equal(tchi_cuda_recording_replay(*state, recording, &begun), TCH_ERR_OUT_OF_MEMORY);
    assert_int_equal(begun, 1);
    assert_string_equal(emulated.timeline, "push factors, launch, pop, push refresh, push root, pop, pop, ");
    tchi_cuda_recording_release(*state, recording);
}

/* Every failing allocation: no recording, and no leak. */
TEST_WITH(no_memory_for_a_recording, open_state, close_state)
{
    with_phases(*state);
    for (int left = 0; left < 4; left++) {
        fake_host.allocations_left = left;
        void *recording = record(*state, queue_ranges);
        fake_host.allocations_left = -1;
        assert_null(recording);
        assert_int_equal(emulated.executables, 0);
    }
}

/* --- when nothing is recorded ------------------------------------------------------------------------------------ */

TEST_WITH(not_while_the_caller_captures, open_state, close_state)
{
    fake_host_begin_capture(fake_host_stream(*state));
    assert_false(can_record(*state));
    fake_host_end_capture(fake_host_stream(*state));
    assert_true(can_record(*state));
}

/* The recorder of a state created with this variable. */
static tchi_cuda_recorder recorder_with(const char *variable, const char *value, int heard)
{
    void *state = NULL;
    fake_host_reset();
    fake_host.ranges_heard = heard;
    setenv(variable, value, 1);
    assert_int_equal(tchi_cuda_state_create(0, &state), TCH_OK);
    unsetenv(variable);
    tchi_cuda_recorder recorder = ((tchi_cuda_state *)state)->recorder;
    assert_int_equal(can_record(state), recorder.enabled);
    tchi_cuda_state_destroy(state);
    return recorder;
}

TEST(phases_where_a_profiler_listens)
{
    assert_false(recorder_with("TORCHIUM_CUDA_RECORD", "", 0).phases);
    assert_true(recorder_with("TORCHIUM_CUDA_RECORD", "", 1).phases);
    assert_true(recorder_with("TORCHIUM_CUDA_RECORD", "phases", 0).phases);
    assert_false(recorder_with("TORCHIUM_CUDA_RECORD", "whole", 1).phases);
}

TEST(not_where_the_environment_says_so)
{
    assert_false(recorder_with("TORCHIUM_CUDA_RECORD", "0", 0).enabled);
    assert_true(recorder_with("TORCHIUM_CUDA_RECORD", "1", 0).enabled);
    assert_false(recorder_with("TORCHIUM_DEBUG_SYNC", "1", 0).enabled);
    assert_true(recorder_with("TORCHIUM_DEBUG_SYNC", "0", 0).enabled);
}

int main(void)
{
    setenv("TORCHIUM_CUBLAS", EMULATED_CUBLAS, 1);
    return test_run(__FILE__, NULL, NULL);
}
