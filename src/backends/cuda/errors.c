/* Errors of CUDA, cuBLAS and cuSOLVER as statuses with messages. Each check is used through the macro of its library in
 * the headers, so that no call goes unchecked and none is checked in two ways. */
#include "cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "capture.h"

/* What a message can add to CUDA's own words; empty when nothing. */
static const char *remedy(cudaError_t error)
{
    switch (error) {
    case cudaErrorNoKernelImageForDevice:
        return "; this build has no machine code for the GPU: add its architecture to TORCHIUM_CUDA_ARCHITECTURES";
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
        return "; the GPU can be used again only by a new process, and TORCHIUM_DEBUG_SYNC=1 there names the kernel";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorStreamCaptureIsolation:
        return "; the stream is being captured in a graph, where this call is not possible";
    default:
        return "";
    }
}

tch_status tchi_cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) {
        return TCH_OK;
    }
    cudaGetLastError(); /* forget it, so that the next check does not report it a second time */
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

/* cuSOLVER has no function for this. */
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
