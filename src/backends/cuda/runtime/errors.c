/* Errors of CUDA, cuBLAS and cuSOLVER as statuses with messages. Every call is checked through the macro of its
 * library. */
#include "backends/cuda/cuda.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- faults ------------------------------------------------------------------------------------------------------ */

/* A kernel fault makes its GPU unusable for the whole process: CUDA returns the same error from every later call. So
 * that these calls can explain it, the first error is kept with the name of the last custom kernel launched before. One
 * entry per GPU, under one lock. */
enum { DEVICES = 64, NAME_BYTES = 160 };

static struct {
    pthread_mutex_t lock;
    atomic_int errors[DEVICES];
    char kernels[DEVICES][NAME_BYTES];
} faults = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Whether the error is sticky. */
static int is_fault(cudaError_t error)
{
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
        return 1;
    default:
        return 0;
    }
}

/* Launches after a fault are not recorded. */
void tchi_cuda_remember_kernel(int32_t device, const char *name)
{
    if (device < 0 || device >= DEVICES) {
        return;
    }
    pthread_mutex_lock(&faults.lock);
    if (atomic_load(&faults.errors[device]) == cudaSuccess && strcmp(faults.kernels[device], name) != 0) {
        snprintf(faults.kernels[device], NAME_BYTES, "%s", name);
    }
    pthread_mutex_unlock(&faults.lock);
}

static void remember_fault(int32_t device, cudaError_t error)
{
    int none = cudaSuccess;
    if (device >= 0 && device < DEVICES) {
        pthread_mutex_lock(&faults.lock);
        atomic_compare_exchange_strong(&faults.errors[device], &none, (int)error);
        pthread_mutex_unlock(&faults.lock);
    }
}

/* cudaSuccess, or the error with the kernel's name, possibly empty. */
static cudaError_t fault_of(int32_t device, char *kernel, size_t size)
{
    if (device < 0 || device >= DEVICES || atomic_load(&faults.errors[device]) == cudaSuccess) {
        return cudaSuccess;
    }
    pthread_mutex_lock(&faults.lock);
    snprintf(kernel, size, "%s", faults.kernels[device]);
    pthread_mutex_unlock(&faults.lock);
    return (cudaError_t)atomic_load(&faults.errors[device]);
}

/* --- messages ---------------------------------------------------------------------------------------------------- */

/* Advice to append to CUDA's error text, possibly empty. */
static const char *remedy(cudaError_t error)
{
    switch (error) {
    case cudaErrorNoKernelImageForDevice:
        return "; this build has no machine code for the GPU: add its architecture to TORCHIUM_CUDA_ARCHITECTURES";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorStreamCaptureIsolation:
        return "; the stream is being captured in a graph, where this call is not possible";
    default:
        return "";
    }
}

/* Kernels run asynchronously, so the last custom kernel need not be the culprit. */
static tch_status fail_by_fault(cudaError_t error, const char *what, int32_t device)
{
    char kernel[192] = "";
    fault_of(device, kernel, sizeof kernel);
    return tchi_cuda_host->fail(TCH_ERR_BACKEND,
                                "%s: %s (%s)%s%s%s; the GPU can be used again only by a new process, and "
                                "TORCHIUM_DEBUG_SYNC=1 there names the kernel that failed",
                                what, cudaGetErrorString(error), cudaGetErrorName(error),
                                kernel[0] != '\0' ? " after kernel " : "", kernel,
                                kernel[0] != '\0' ? " was launched" : "");
}

tch_status tchi_cuda_check_device(int32_t device)
{
    char kernel[192] = "";
    char what[64];
    cudaError_t error = fault_of(device, kernel, sizeof kernel);
    if (error == cudaSuccess) {
        return TCH_OK;
    }
    snprintf(what, sizeof what, "this process can no longer use cuda:%d", device);
    return fail_by_fault(error, what, device);
}

tch_status tchi_cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) {
        return TCH_OK;
    }
    cudaGetLastError(); /* forget it, so that the next check does not report it a second time */
    if (is_fault(error)) {
        int32_t device = tchi_cuda_entered();
        remember_fault(device, error);
        return fail_by_fault(error, what, device);
    }
    return tchi_cuda_host->fail(error == cudaErrorMemoryAllocation ? TCH_ERR_OUT_OF_MEMORY : TCH_ERR_BACKEND,
                                "%s: %s (%s)%s", what, cudaGetErrorString(error), cudaGetErrorName(error),
                                remedy(error));
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int debug_sync;

static void read_debug_sync(void)
{
    const char *value = getenv("TORCHIUM_DEBUG_SYNC");
    debug_sync = value != NULL && strcmp(value, "1") == 0;
}

tch_status tchi_cuda_launched(const tchi_cuda_state *state, const char *kernel)
{
    cudaError_t error = cudaGetLastError();
    pthread_once(&once, read_debug_sync);
    if (error == cudaSuccess && debug_sync && !tchi_cuda_is_capturing(state->stream)) {
        error = cudaStreamSynchronize(state->stream);
    }
    return tchi_cuda_check(error, kernel);
}

tch_status tchi_cublas_check(tchi_cublas_status status, const char *what)
{
    enum { ALLOC_FAILED = 3 };
    if (status == 0) {
        return TCH_OK;
    }
    return tchi_cuda_host->fail(status == ALLOC_FAILED ? TCH_ERR_OUT_OF_MEMORY : TCH_ERR_BACKEND, "%s: cuBLAS says: %s",
                                what, tchi_cublas_open(NULL)->get_status_string(status));
}

/* cuSOLVER has no status strings. */
static const char *cusolver_words(tchi_cusolver_status status)
{
    static const char *const words[] = {
        "success",           "not initialized", "allocation failed", "invalid value",
        "GPU not supported", "mapping error",   "execution failed",  "internal error",
        "matrix type",       "not supported",   "zero pivot",        "invalid license",
    };
    return status >= 0 && (size_t)status < sizeof words / sizeof words[0] ? words[status] : "unknown status";
}

tch_status tchi_cusolver_check(tchi_cusolver_status status, const char *what)
{
    enum { ALLOC_FAILED = 2 };
    if (status == 0) {
        return TCH_OK;
    }
    return tchi_cuda_host->fail(status == ALLOC_FAILED ? TCH_ERR_OUT_OF_MEMORY : TCH_ERR_BACKEND,
                                "%s: cuSOLVER says: %s (status %d)", what, cusolver_words(status), status);
}
