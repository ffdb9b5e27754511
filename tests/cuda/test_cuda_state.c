/* The host side of the CUDA module, on a runtime that only pretends (support/cuda/fake_runtime.h): whose device is
 * current, what a change of streams orders, what graph capture forbids, and how memory runs out. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backends/cuda/cuda.h"

#include "support/cuda/fake_host.h"
#include "support/cuda/fake_runtime.h"
#include "support/testing.h"

/* A state on device 1, while device 0 is the caller's. */
static int open_state(void **state)
{
    fake_runtime_reset();
    fake_host.message[0] = '\0';
    return tchi_cuda_state_create(1, state) == TCH_OK ? 0 : -1;
}

static int close_state(void **state)
{
    tchi_cuda_state_destroy(*state);
    return fake.allocated == 0 && fake.streams == 0 && fake.current == 0 && fake_host.bytes == 0 ? 0 : -1;
}

/* --- devices ----------------------------------------------------------------------------------------------------- */

static void without_cublas_no_device_counts(void **state)
{
    (void)state;
    fake_runtime_reset();
    fflush(NULL);
    pid_t child = fork(); /* the library is looked for once per process */
    if (child == 0) {
        char reason[1024] = "";
        setenv("TORCHIUM_CUBLAS", "/nowhere/libcublas.so.13", 1);
        _exit(tchi_cuda_device_count(reason, sizeof reason, NULL, 0) == 0 && strstr(reason, "/nowhere/libcublas.so.13")
                  ? 0
                  : 1);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void old_gpus_are_told_apart(void **state)
{
    void *none = NULL;
    char reason[1024] = "";
    (void)state;
    fake_runtime_reset();
    fake.capability[0] = 70;
    fake.capability[1] = 61;
    assert_int_equal(tchi_cuda_device_count(reason, sizeof reason, NULL, 0), 0);
    assert_non_null(strstr(reason, "Imaginary GPU, compute capability 7.0"));
    fake.capability[1] = 75; /* one will do, and keeps its number */
    assert_int_equal(tchi_cuda_device_count(reason, sizeof reason, NULL, 0), 2);
    assert_int_equal(tchi_cuda_state_create(0, &none), TCH_ERR_UNAVAILABLE);
    fake_host_expect("cuda:0 has compute capability 7.0");
    assert_int_equal(fake_host.bytes, 0);
}

static void asking_about_a_device_leaves_the_current_one(void **state)
{
    (void)state;
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    fake_runtime_reset();
    assert_int_equal(tchi_cuda_device_info(1, &info), TCH_OK);
    assert_int_equal(info.free_memory, 1001); /* device 1's */
    assert_int_equal(fake.current, 0);
}

static void every_call_gives_the_device_back(void **state)
{
    assert_int_equal(fake.current, 0);
    assert_int_equal(tchi_cuda_begin(*state), TCH_OK);
    assert_int_equal(fake.current, 1);
    assert_int_equal(tchi_cuda_begin(*state), TCH_OK);
    tchi_cuda_end(*state);
    assert_int_equal(fake.current, 1); /* still inside the outer call */
    tchi_cuda_end(*state);
    assert_int_equal(fake.current, 0);
    fake.broken = cudaErrorIllegalAddress;
    assert_int_equal(tchi_cuda_begin(*state), TCH_ERR_BACKEND);
    fake_host_expect("cudaErrorIllegalAddress");
    fake_host_expect("only by a new process");
    fake.broken = cudaSuccess;
    assert_int_equal(tchi_cuda_synchronize(*state), TCH_OK);
    assert_int_equal(fake.current, 0);
}

/* --- streams ----------------------------------------------------------------------------------------------------- */

static tch_status use_stream(void *state, void *stream)
{
    return tchi_cuda_stream(state, 1, &stream);
}

static void *stream_of(void *state)
{
    void *stream = NULL;
    assert_int_equal(tchi_cuda_stream(state, 0, &stream), TCH_OK);
    return stream;
}

static void a_new_stream_follows_the_old(void **state)
{
    tchi_cuda_state *s = *state;
    struct CUstream_st ours = {1};
    struct CUstream_st foreign = {0};
    assert_int_equal(tchi_cuda_begin(s), TCH_OK);
    assert_int_equal(use_stream(s, &foreign), TCH_ERR_DEVICE);
    fake_host_expect("cuda:0");
    fake_host_expect("cuda:1");
    assert_ptr_equal(stream_of(s), s->own);
    assert_int_equal(use_stream(s, &ours), TCH_OK);
    assert_ptr_equal(stream_of(s), &ours);
    assert_ptr_equal(fake.recorded, s->own);
    assert_ptr_equal(fake.waiting, &ours);
    assert_int_equal(use_stream(s, NULL), TCH_OK);
    assert_ptr_equal(fake.recorded, &ours);
    assert_null(fake.waiting);
    fake.captured = &ours;
    fake.recorded = NULL;
    assert_int_equal(use_stream(s, &ours), TCH_OK);
    assert_null(fake.recorded); /* a graph cannot wait for what is outside */
    fake.captured = NULL;
    assert_int_equal(use_stream(s, s->own), TCH_OK);
    tchi_cuda_end(s);
}

static void capture_forbids_waiting_and_allocating(void **state)
{
    tchi_cuda_state *s = *state;
    void *block = NULL;
    void *more = NULL;
    double a = 1;
    double b = 2;
    assert_int_equal(tchi_cuda_begin(s), TCH_OK);
    assert_int_equal(tchi_cuda_allocate(s, 100, &block), TCH_OK);
    fake.captured = s->own;
    assert_int_equal(tchi_cuda_allocate(s, 100, &more), TCH_ERR_UNSUPPORTED);
    fake_host_expect("once before capturing");
    assert_int_equal(tchi_cuda_synchronize(s), TCH_ERR_UNSUPPORTED);
    assert_int_equal(tchi_cuda_copy_bytes(s, &a, &b, sizeof a, TCH_COPY_TO_HOST), TCH_ERR_UNSUPPORTED);
    assert_int_equal(tchi_cuda_copy_bytes(s, &a, &b, sizeof a, TCH_COPY_TO_DEVICE), TCH_ERR_UNSUPPORTED);
    fake_host_expect("page-locked");
    assert_true(a == 1);
    fake.page_locked = &b;
    assert_int_equal(tchi_cuda_copy_bytes(s, &a, &b, sizeof a, TCH_COPY_TO_DEVICE), TCH_OK);
    assert_int_equal(tchi_cuda_copy_bytes(s, &a, &b, sizeof a, TCH_COPY_DEVICE), TCH_OK);
    assert_int_equal(tchi_cuda_launched(s, "kernel"), TCH_OK);
    assert_int_equal(fake.bad_waits, 0);
    fake.captured = NULL;
    tchi_cuda_release(s, block, 100);
    tchi_cuda_end(s);
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static void memory_that_runs_out(void **state)
{
    void *block = NULL;
    assert_int_equal(tchi_cuda_begin(*state), TCH_OK);
    fake.failing_allocations = 1; /* what was given back comes free by waiting */
    assert_int_equal(tchi_cuda_allocate(*state, 100, &block), TCH_OK);
    assert_int_equal(fake.trims, 1);
    tchi_cuda_release(*state, block, 100);
    fake.failing_allocations = 2;
    assert_int_equal(tchi_cuda_allocate(*state, 12345, &block), TCH_ERR_OUT_OF_MEMORY);
    fake_host_expect("12345 bytes were requested, 1001 of 2000 are free");
    assert_int_equal(fake.pending, cudaSuccess); /* nobody meets the error again */
    tchi_cuda_end(*state);
}

static void memory_is_given_back_from_anywhere(void **state)
{
    const tchi_cuda_state *s = *state;
    void *block = NULL;
    assert_int_equal(tchi_cuda_begin(*state), TCH_OK);
    assert_int_equal(tchi_cuda_allocate(*state, 100, &block), TCH_OK);
    tchi_cuda_end(*state);
    tchi_cuda_release(*state, block, 100);
    assert_ptr_equal(fake.freed_on, s->own);
    assert_int_equal(fake.current, 0);
    tchi_cuda_release(*state, NULL, 0);
}

static void a_failed_launch_is_reported_once(void **state)
{
    fake.pending = cudaErrorNoKernelImageForDevice;
    assert_int_equal(tchi_cuda_launched(*state, "some_kernel"), TCH_ERR_BACKEND);
    fake_host_expect("some_kernel: words of CUDA");
    fake_host_expect("TORCHIUM_CUDA_ARCHITECTURES");
    assert_int_equal(tchi_cuda_launched(*state, "some_kernel"), TCH_OK);
}

static void a_state_that_cannot_be_made_leaves_nothing(void **state)
{
    void *none = NULL;
    (void)state;
    fake_runtime_reset();
    fake.failing_allocations = 2; /* of the workspace of cuBLAS */
    assert_int_equal(tchi_cuda_state_create(1, &none), TCH_ERR_OUT_OF_MEMORY);
    assert_int_equal(fake.streams, 0);
    assert_int_equal(fake.allocated, 0);
    assert_int_equal(fake.current, 0);
    assert_int_equal(fake_host.bytes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_cublas_no_device_counts),
        cmocka_unit_test(old_gpus_are_told_apart),
        cmocka_unit_test(asking_about_a_device_leaves_the_current_one),
        cmocka_unit_test(a_state_that_cannot_be_made_leaves_nothing),
        cmocka_unit_test_setup_teardown(every_call_gives_the_device_back, open_state, close_state),
        cmocka_unit_test_setup_teardown(a_new_stream_follows_the_old, open_state, close_state),
        cmocka_unit_test_setup_teardown(capture_forbids_waiting_and_allocating, open_state, close_state),
        cmocka_unit_test_setup_teardown(memory_that_runs_out, open_state, close_state),
        cmocka_unit_test_setup_teardown(memory_is_given_back_from_anywhere, open_state, close_state),
        cmocka_unit_test_setup_teardown(a_failed_launch_is_reported_once, open_state, close_state),
    };
    setenv("TORCHIUM_CUBLAS", FAKE_CUBLAS, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
