#include "fake_host.h"

#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backends/cuda/cuda.h"

#include "support/testing.h"

fake_host_record fake_host = {.allocations_left = -1};

static tch_status record(tch_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fake_host.message, sizeof fake_host.message, format, arguments);
    va_end(arguments);
    return status;
}

static void *host_allocate(size_t bytes, size_t alignment)
{
    if (fake_host.allocations_left == 0) {
        return NULL;
    }
    fake_host.allocations_left -= fake_host.allocations_left > 0;
    fake_host.bytes += (int64_t)bytes;
    return malloc(bytes);
}

static void host_release(void *pointer, size_t bytes)
{
    fake_host.bytes -= (int64_t)bytes;
    free(pointer);
}

static const tch_backend_host host = {sizeof host, record, host_allocate, host_release, NULL};
const tch_backend_host *tchi_cuda_host = &host;

/* --- replacements of staging.c, control.cu and ranges.c ---------------------------------------------------------- */

void tchi_cuda_staging_destroy(tchi_cuda_staging *staging)
{
}

tch_status tchi_cuda_store_numbers(tchi_cuda_state *s, double *dst, const double *values, int64_t count)
{
    size_t bytes = (size_t)count * sizeof *dst;
    return tchi_cuda_check(cudaMemcpyAsync(dst, values, bytes, cudaMemcpyHostToDevice, s->stream), "numbers");
}

bool tchi_cuda_profiler_attached(void)
{
    return fake_host.ranges_heard;
}

void tchi_cuda_range_open(const char *name)
{
    emulator_note("push ", name);
}

void tchi_cuda_range_close(void)
{
    emulator_note("pop", "");
}

/* --- for tests --------------------------------------------------------------------------------------------------- */

void fake_host_reset(void)
{
    fake_host.message[0] = '\0';
    fake_host.ranges_heard = 0;
    emulated = (emulator_control){.devices = 2, .capability = {90, 90}, .most_threads = 1024, .registers = 40};
}

int fake_host_open(void **state)
{
    fake_host_reset();
    return tchi_cuda_state_create(1, state) == TCH_OK ? 0 : -1;
}

int fake_host_close(void **state)
{
    tchi_cuda_state_destroy(*state);
    return fake_host_is_clean() ? 0 : -1;
}

cudaStream_t fake_host_stream(void *state)
{
    void *stream = NULL;
    assert_int_equal(tchi_cuda_stream(state, 0, &stream), TCH_OK);
    return stream;
}

void fake_host_begin_capture(cudaStream_t stream)
{
    assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
}

void fake_host_end_capture(cudaStream_t stream)
{
    cudaGraph_t graph = NULL;
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cudaGraphDestroy(graph);
}

int fake_host_fail_allocations(tch_status (*call)(void *data), void *data)
{
    int64_t before = fake_host.bytes;
    int libraries = emulated.libraries;
    int failures = -1;
    tch_status status = TCH_ERR_OUT_OF_MEMORY;
    for (; status != TCH_OK; failures++) {
        fake_host.allocations_left = failures + 1;
        status = call(data);
        fake_host.allocations_left = -1;
        assert_true(status == TCH_OK || status == TCH_ERR_OUT_OF_MEMORY);
        assert_true(status == TCH_OK || (fake_host.bytes == before && emulated.libraries == libraries));
    }
    return failures;
}

int fake_host_is_clean(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    int device = -1;
    emulated.fault.failures = 0;
    cudaThreadExchangeStreamCaptureMode(&mode);
    return emulated.blocks == 0 && emulated.streams == 0 && emulated.graphs == 0 && emulated.executables == 0 &&
           emulated.libraries == 0 && fake_host.bytes == 0 && mode == cudaStreamCaptureModeGlobal &&
           cudaGetLastError() == cudaSuccess && cudaGetDevice(&device) == cudaSuccess && device == 0;
}

void fake_host_expect(const char *words)
{
    CHECK(strstr(fake_host.message, words) != NULL, "expected \"%s\" in: %s", words, fake_host.message);
}

void fake_host_in_a_child(int (*body)(void))
{
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        _exit(body());
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
