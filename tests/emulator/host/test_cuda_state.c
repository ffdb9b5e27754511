/* The host side of the CUDA module on the emulated device: the current device, ordering of streams, restrictions of
 * graph capture, and out of memory. */
#define _GNU_SOURCE
#include <limits.h>

#include "backends/cuda/cuda.h"

#include "emulator/host/fake_host.h"
#include "support/testing.h"

static int current_device(void)
{
    int device = -1;
    assert_int_equal(cudaGetDevice(&device), cudaSuccess);
    return device;
}

/* --- devices ----------------------------------------------------------------------------------------------------- */

static int count_without_cublas(void)
{
    char reason[1024] = "";
    setenv("TORCHIUM_CUBLAS", "/nowhere/libcublas.so.13", 1);
    return tchi_cuda_device_count(reason, sizeof reason, NULL, 0) != 0 ||
           strstr(reason, "/nowhere/libcublas.so.13") == NULL;
}

TEST(without_cublas_no_device_counts)
{
    fake_host_reset();
    fake_host_in_a_child(count_without_cublas); /* the library is located once per process */
}

TEST(old_gpus_are_told_apart)
{
    void *none = NULL;
    char reason[1024] = "";
    fake_host_reset();
    emulated.capability[0] = 70;
    emulated.capability[1] = 61;
    assert_int_equal(tchi_cuda_device_count(reason, sizeof reason, NULL, 0), 0);
    assert_non_null(strstr(reason, "emulated GPU, compute capability 7.0"));
    emulated.capability[1] = 75; /* one suffices, and keeps its index */
    assert_int_equal(tchi_cuda_device_count(reason, sizeof reason, NULL, 0), 2);
    assert_int_equal(tchi_cuda_state_create(0, &none), TCH_ERR_UNAVAILABLE);
    fake_host_expect("cuda:0 has compute capability 7.0");
    assert_int_equal(fake_host.bytes, 0);
}

FAKE_HOST_TEST(asking_about_a_device_leaves_the_current_one)
{
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    assert_int_equal(tchi_cuda_device_info(0, &info), TCH_OK);
    assert_int_equal(info.free_memory, info.total_memory);
    assert_int_equal(tchi_cuda_device_info(1, &info), TCH_OK); /* the device of the state's workspace */
    assert_int_equal(info.free_memory, info.total_memory - tchi_cuda_workspace_bytes(*state));
    assert_int_equal(current_device(), 0);
}

FAKE_HOST_TEST(every_call_gives_the_device_back)
{
    assert_int_equal(current_device(), 0);
    assert_int_equal(tchi_cuda_begin(*state), TCH_OK);
    assert_int_equal(current_device(), 1);
    assert_int_equal(tchi_cuda_begin(*state), TCH_OK);
    tchi_cuda_end(*state);
    assert_int_equal(current_device(), 1); /* still inside the outer call */
    tchi_cuda_end(*state);
    assert_int_equal(current_device(), 0);
    emulated.fault = (emulator_fault){"cudaGetDevice", cudaErrorIllegalAddress, 0, 1};
    assert_int_equal(tchi_cuda_begin(*state), TCH_ERR_BACKEND);
    fake_host_expect("cudaErrorIllegalAddress");
    fake_host_expect("only by a new process");
    assert_int_equal(tchi_cuda_synchronize(*state), TCH_OK);
    assert_int_equal(current_device(), 0);
}

/* --- streams ----------------------------------------------------------------------------------------------------- */

static tch_status set_stream(void *state, void *stream)
{
    return tchi_cuda_stream(state, 1, &stream);
}

/* On this device, for an independent caller. */
static cudaStream_t make_stream(int device)
{
    cudaStream_t stream;
    int before = current_device();
    cudaSetDevice(device);
    assert_int_equal(cudaStreamCreate(&stream), cudaSuccess);
    cudaSetDevice(before);
    return stream;
}

FAKE_HOST_TEST(a_new_stream_follows_the_old)
{
    tchi_cuda_state *s = *state;
    cudaStream_t local = make_stream(1);
    cudaStream_t foreign = make_stream(0);
    assert_int_equal(tchi_cuda_begin(s), TCH_OK);
    assert_int_equal(set_stream(s, foreign), TCH_ERR_DEVICE);
    fake_host_expect("cuda:0");
    fake_host_expect("cuda:1");
    assert_ptr_equal(fake_host_stream(s), s->local);
    assert_int_equal(set_stream(s, local), TCH_OK);
    assert_ptr_equal(fake_host_stream(s), local);
    assert_ptr_equal(emulated.recorded, s->local);
    assert_ptr_equal(emulated.waiting, local);
    assert_int_equal(set_stream(s, NULL), TCH_OK);
    assert_ptr_equal(emulated.recorded, local);
    assert_null(emulated.waiting);
    fake_host_begin_capture(local);
    emulated.recorded = NULL;
    assert_int_equal(set_stream(s, local), TCH_OK);
    assert_null(emulated.recorded); /* a graph cannot wait for outside events */
    fake_host_end_capture(local);
    assert_int_equal(set_stream(s, s->local), TCH_OK);
    tchi_cuda_end(s);
    cudaStreamDestroy(local);
    cudaStreamDestroy(foreign);
}

FAKE_HOST_TEST(capture_forbids_waiting_and_allocating)
{
    tchi_cuda_state *s = *state;
    void *block = NULL;
    void *more = NULL;
    void *locked = NULL;
    double a = 1;
    double b = 2;
    assert_int_equal(tchi_cuda_begin(s), TCH_OK);
    assert_int_equal(tchi_cuda_allocate(s, 100, &block), TCH_OK);
    assert_int_equal(cudaMallocHost(&locked, sizeof b), cudaSuccess);
    fake_host_begin_capture(s->local);
    assert_int_equal(tchi_cuda_allocate(s, 100, &more), TCH_ERR_UNSUPPORTED);
    fake_host_expect("once before capturing");
    assert_int_equal(tchi_cuda_synchronize(s), TCH_ERR_UNSUPPORTED);
    assert_int_equal(tchi_cuda_copy_bytes(s, &a, &b, sizeof a, TCH_COPY_TO_HOST), TCH_ERR_UNSUPPORTED);
    assert_int_equal(tchi_cuda_copy_bytes(s, &a, &b, sizeof a, TCH_COPY_TO_DEVICE), TCH_ERR_UNSUPPORTED);
    fake_host_expect("page-locked");
    assert_int_equal(tchi_cuda_copy_bytes(s, &a, locked, sizeof a, TCH_COPY_TO_DEVICE), TCH_OK);
    assert_int_equal(tchi_cuda_copy_bytes(s, &a, &b, sizeof a, TCH_COPY_DEVICE), TCH_OK);
    assert_true(a == 1);
    assert_int_equal(tchi_cuda_launched(s, "kernel"), TCH_OK);
    fake_host_end_capture(s->local);
    cudaFreeHost(locked);
    tchi_cuda_release(s, block, 100);
    tchi_cuda_end(s);
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

FAKE_HOST_TEST(memory_that_runs_out)
{
    void *block = NULL;
    assert_int_equal(tchi_cuda_begin(*state), TCH_OK);
    emulated.fault = (emulator_fault){"cudaMalloc", cudaErrorMemoryAllocation, 0, 1};
    assert_int_equal(tchi_cuda_allocate(*state, 100, &block), TCH_OK); /* released memory becomes available by
                                                                          synchronizing */
    assert_int_equal(emulated.trims, 1);
    tchi_cuda_release(*state, block, 100);
    emulated.fault.failures = 2;
    assert_int_equal(tchi_cuda_allocate(*state, 12345, &block), TCH_ERR_OUT_OF_MEMORY);
    fake_host_expect("12345 bytes were requested, 4261412864 of 4294967296 are free");
    assert_int_equal(cudaGetLastError(), cudaSuccess); /* the error is not reported again */
    tchi_cuda_end(*state);
}

FAKE_HOST_TEST(memory_is_given_back_from_anywhere)
{
    const tchi_cuda_state *s = *state;
    void *block = NULL;
    assert_int_equal(tchi_cuda_begin(*state), TCH_OK);
    assert_int_equal(tchi_cuda_allocate(*state, 100, &block), TCH_OK);
    tchi_cuda_end(*state);
    tchi_cuda_release(*state, block, 100);
    assert_ptr_equal(emulated.freed_on, s->local);
    assert_int_equal(current_device(), 0);
    tchi_cuda_release(*state, NULL, 0);
}

FAKE_HOST_TEST(a_failed_launch_is_reported_once)
{
    emulated.fault = (emulator_fault){"cudaGetLastError", cudaErrorNoKernelImageForDevice, 0, 1};
    assert_int_equal(tchi_cuda_launched(*state, "some_kernel"), TCH_ERR_BACKEND);
    fake_host_expect("some_kernel: error of the emulated device");
    fake_host_expect("TORCHIUM_CUDA_ARCHITECTURES");
    assert_int_equal(tchi_cuda_launched(*state, "some_kernel"), TCH_OK);
}

TEST(a_state_that_cannot_be_made_leaves_nothing)
{
    void *none = NULL;
    fake_host_reset();
    emulated.fault = (emulator_fault){"cudaMalloc", cudaErrorMemoryAllocation, 0, 2}; /* cuBLAS workspace */
    assert_int_equal(tchi_cuda_state_create(1, &none), TCH_ERR_OUT_OF_MEMORY);
    assert_true(fake_host_is_clean());
}

int main(void)
{
    setenv("TORCHIUM_CUBLAS", EMULATED_CUBLAS, 1);
    return test_run(__FILE__, NULL, NULL);
}
