/* CUDA's runtime for one device whose memory is the host's. Work is done when it is asked for, so that streams, events
 * and waits have nothing to do; graphs cannot be captured, and custom kernels cannot be loaded.
 *
 * TORCHIUM_EMULATOR_CAPABILITY, 9.0 unless set, says which kind of device it is, and so which kernels the host
 * chooses. */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cudaTypedefs.h>

#include "machine.h"

enum { PROCESSORS = 16, L2_BYTES = 50 << 20 };
static const size_t all_memory = (size_t)4 << 30;

static _Thread_local cudaError_t last_error;
static int everything; /* what handles point to */

/* --- errors ------------------------------------------------------------------------------------------------------ */

static cudaError_t result(cudaError_t error)
{
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

void emulator_note_result(int failed)
{
    result(failed != 0 ? cudaErrorLaunchFailure : cudaSuccess);
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

/* A kernel's failure has a message of its own. */
const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorLaunchFailure      ? emulator_message()
           : error == cudaErrorMemoryAllocation ? "out of memory"
           : error == cudaErrorNotSupported     ? "not supported by the emulated device"
                                                : "error of the emulated device";
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorLaunchFailure      ? "cudaErrorLaunchFailure"
           : error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
           : error == cudaErrorNotSupported     ? "cudaErrorNotSupported"
                                                : "cudaError";
}

/* --- the device -------------------------------------------------------------------------------------------------- */

static int capability(void)
{
    const char *wanted = getenv("TORCHIUM_EMULATOR_CAPABILITY");
    int major = 9;
    int minor = 0;
    if (wanted != NULL && sscanf(wanted, "%d.%d", &major, &minor) != 2) {
        major = 9, minor = 0;
    }
    return 10 * major + minor;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

/* In bytes, for a block: of Turing, Ampere and Hopper. */
static int shared_most(void)
{
    return capability() < 80 ? 65536 : capability() < 90 ? 166912 : EMULATOR_SHARED_MOST;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device)
{
    switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = capability() / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = capability() % 10;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = PROCESSORS;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = shared_most();
        break;
    case cudaDevAttrL2CacheSize:
        *value = L2_BYTES;
        break;
    case cudaDevAttrMemoryPoolsSupported:
        *value = 1;
        break;
    default:
        return result(cudaErrorInvalidValue);
    }
    return cudaSetDevice(device);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "emulated GPU");
    properties->major = capability() / 10;
    properties->minor = capability() % 10;
    properties->multiProcessorCount = PROCESSORS;
    properties->l2CacheSize = L2_BYTES;
    properties->sharedMemPerBlockOptin = (size_t)shared_most();
    return cudaSetDevice(device);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* What is in use, in bytes, and each block's size before it: pools must not hold more than the device has. */
static size_t used_memory;
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct allocation {
    void *pointer;
    size_t bytes;
} allocation;

static allocation *allocations; /* sorted by nothing: there are few */
static size_t allocation_count, allocation_room;

static int note_allocation(void *pointer, size_t bytes)
{
    if (allocation_count == allocation_room) {
        size_t room = allocation_room == 0 ? 256 : 2 * allocation_room;
        allocation *more = realloc(allocations, room * sizeof *more);
        if (more == NULL) {
            return 0;
        }
        allocations = more;
        allocation_room = room;
    }
    allocations[allocation_count++] = (allocation){pointer, bytes};
    used_memory += bytes;
    return 1;
}

static void forget_allocation(void *pointer)
{
    for (size_t i = allocation_count; i-- > 0;) {
        if (allocations[i].pointer == pointer) {
            used_memory -= allocations[i].bytes;
            allocations[i] = allocations[--allocation_count];
            return;
        }
    }
}

/* Full of NaN, so that what is read before it was written is seen. */
cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    *pointer = NULL;
    pthread_mutex_lock(&memory_lock);
    int fits = bytes <= all_memory && used_memory <= all_memory - bytes;
    int good = fits && posix_memalign(pointer, 256, bytes > 0 ? bytes : 1) == 0;
    if (good && !note_allocation(*pointer, bytes)) {
        free(*pointer);
        good = 0;
    }
    pthread_mutex_unlock(&memory_lock);
    if (good) {
        memset(*pointer, 0xFF, bytes);
    }
    return result(good ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *pointer)
{
    pthread_mutex_lock(&memory_lock);
    forget_allocation(pointer);
    pthread_mutex_unlock(&memory_lock);
    free(pointer);
    return cudaSuccess;
}

__attribute__((destructor)) static void forget_all(void)
{
    free(allocations);
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties)
{
    (void)properties;
    *pool = (cudaMemPool_t)(void *)&everything;
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes)
{
    (void)pool, (void)bytes;
    return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t stream)
{
    (void)pool, (void)stream;
    return cudaMalloc(pointer, bytes);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
    (void)stream;
    return cudaFree(pointer);
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    return result(posix_memalign(pointer, 256, bytes > 0 ? bytes : 1) == 0 ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    (void)flags;
    return cudaMallocHost(pointer, bytes);
}

cudaError_t cudaFreeHost(void *pointer)
{
    free(pointer);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    pthread_mutex_lock(&memory_lock);
    *available = all_memory - used_memory;
    *total = all_memory;
    pthread_mutex_unlock(&memory_lock);
    return cudaSuccess;
}

/* All host memory is taken as pageable. */
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    (void)pointer;
    attributes->type = cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)kind, (void)stream;
    memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)kind, (void)stream;
    for (size_t i = 0; i < height; i++) {
        memmove((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    }
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    memset(to, value, bytes);
    return cudaSuccess;
}

/* --- streams and events ------------------------------------------------------------------------------------------ */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    (void)flags;
    *stream = (cudaStream_t)calloc(1, 16); /* streams differ from each other */
    return result(*stream != NULL ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    (void)stream;
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)stream, (void)event, (void)flags;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    (void)flags;
    *event = (cudaEvent_t)calloc(1, 16);
    return result(*event != NULL ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    (void)event, (void)stream;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    (void)event;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

/* --- what there is not ------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    (void)stream;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    (void)mode;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    (void)stream, (void)mode;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    (void)stream, (void)graph;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    (void)graph, (void)nodes, (void)count;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags)
{
    (void)executable, (void)graph, (void)flags;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    (void)executable, (void)stream;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    (void)graph;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    (void)executable;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    int good = attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value <= shared_most();
    return result(function != NULL && good ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    (void)attributes, (void)function;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaFuncGetParamInfo(const void *function, size_t index, size_t *offset, size_t *size)
{
    (void)function, (void)index, (void)offset, (void)size;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared)
{
    (void)blocks, (void)function, (void)threads, (void)shared;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream)
{
    (void)function, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options, void **values,
                                unsigned count, enum cudaLibraryOption *library_options, void **library_values,
                                unsigned library_count)
{
    (void)library, (void)code, (void)options, (void)values, (void)count;
    (void)library_options, (void)library_values, (void)library_count;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library)
{
    (void)library;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
    (void)kernel, (void)library, (void)name;
    return result(cudaErrorNotSupported);
}

cudaError_t cudaLibraryGetGlobal(void **address, size_t *bytes, cudaLibrary_t library, const char *name)
{
    (void)address, (void)bytes, (void)library, (void)name;
    return result(cudaErrorNotSupported);
}

/* --- tensor maps ------------------------------------------------------------------------------------------------- */

/* What the driver checks, and what copies.c can do: three dimensions, rows of 128 bytes in a box. */
static CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                             const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                             const cuuint32_t *every, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    int32_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    int good = rank == 3 && (uintptr_t)address % 16 == 0 && strides[0] % 16 == 0 && strides[1] % 16 == 0 &&
               box[0] * (cuuint32_t)bytes == 128 && box[1] <= 256 && box[2] == 1 && every[0] == 1 && every[1] == 1 &&
               swizzle == CU_TENSOR_MAP_SWIZZLE_128B && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE;
    (void)promotion, (void)fill;
    if (!good) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *map = (CUtensorMap){.address = address, .element_bytes = bytes, .known = 1};
    for (int d = 0; d < 3; d++) {
        map->sizes[d] = (int64_t)sizes[d];
        map->box[d] = (int32_t)box[d];
    }
    map->strides[0] = (int64_t)strides[0];
    map->strides[1] = (int64_t)strides[1];
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *found)
{
    PFN_cuTensorMapEncodeTiled_v12000 encode = encode_tiled;
    (void)version, (void)flags;
    if (strcmp(name, "cuTensorMapEncodeTiled") != 0) {
        *found = cudaDriverEntryPointSymbolNotFound;
        return cudaSuccess;
    }
    memcpy(function, &encode, sizeof encode);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
