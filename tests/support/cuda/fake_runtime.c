/* See fake_runtime.h. Device memory is malloc's, so that AddressSanitizer would see what is freed twice. */
#include "fake_runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cuda/cuda.h"

fake_runtime fake;

void fake_runtime_reset(void)
{
    fake = (fake_runtime){.devices = 2, .capability = {90, 90}, .has_pools = 1, .nodes = 1};
}

/* --- errors and devices ------------------------------------------------------------------------------------------ */

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = fake.pending;
    fake.pending = cudaSuccess;
    return error;
}

const char *cudaGetErrorString(cudaError_t error)
{
    (void)error;
    return "words of CUDA";
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "cudaErrorOther";
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = fake.devices;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = fake.current;
    return fake.broken;
}

cudaError_t cudaSetDevice(int device)
{
    fake.current = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = fake.capability[device] / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = fake.capability[device] % 10;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = 200000;
        break;
    case cudaDevAttrMemoryPoolsSupported:
        *value = fake.has_pools;
        break;
    default:
        *value = 1;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "Imaginary GPU");
    properties->major = fake.capability[device] / 10;
    properties->minor = fake.capability[device] % 10;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    *available = 1000 + (size_t)fake.current;
    *total = 2000;
    return cudaSuccess;
}

/* --- streams and events ------------------------------------------------------------------------------------------ */

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    *stream = malloc(sizeof **stream);
    (*stream)->device = fake.current;
    fake.streams++;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    (void)flags;
    return cudaStreamCreate(stream);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    fake.streams--;
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    *device = stream != NULL ? stream->device : fake.current;
    return cudaSuccess;
}

static int is_captured(cudaStream_t stream)
{
    return stream != NULL && (stream == fake.captured || stream == fake.captured_too);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    fake.synchronized++;
    fake.bad_waits += is_captured(stream);
    return fake.waiting_says;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    if (stream == NULL && fake.captured != NULL) {
        return fake.pending = cudaErrorStreamCaptureImplicit;
    }
    *status = is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode before = fake.mode;
    fake.mode = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    (void)mode;
    if (stream == NULL || fake.captured_too != NULL || is_captured(stream) || fake.capture_says != cudaSuccess) {
        return fake.pending = fake.capture_says != cudaSuccess ? fake.capture_says : cudaErrorIllegalState;
    }
    *(fake.captured == NULL ? &fake.captured : &fake.captured_too) = stream;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    *graph = NULL;
    if (!is_captured(stream)) {
        return fake.pending = cudaErrorIllegalState;
    }
    fake.captured = stream == fake.captured ? fake.captured_too : fake.captured;
    fake.captured_too = NULL;
    if (fake.end_says != cudaSuccess) {
        return fake.pending = fake.end_says;
    }
    *graph = malloc(sizeof fake.nodes);
    memcpy(*graph, &fake.nodes, sizeof fake.nodes);
    fake.graphs++;
    return cudaSuccess;
}

static void note(const char *what, const char *name)
{
    size_t used = strlen(fake.timeline);
    snprintf(fake.timeline + used, sizeof fake.timeline - used, "%s%s, ", what, name);
}

/* --- graphs ------------------------------------------------------------------------------------------------------ */

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    (void)nodes;
    *count = *(size_t *)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags)
{
    (void)graph;
    (void)flags;
    if (fake.graph_says != cudaSuccess) {
        return fake.pending = fake.graph_says;
    }
    *executable = malloc(1);
    fake.executables++;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    free(graph);
    fake.graphs--;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    free(executable);
    fake.executables--;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    (void)executable;
    fake.replayed_on = stream;
    if (fake.replay_says != cudaSuccess && fake.replays_before-- <= 0) {
        return fake.pending = fake.replay_says;
    }
    note("launch", "");
    return cudaSuccess;
}

/* --- ranges, in the place of ranges.c ---------------------------------------------------------------------------- */

bool tchi_cuda_ranges_heard(void)
{
    return fake.heard;
}

void tchi_cuda_range_open(const char *name)
{
    note("push ", name);
}

void tchi_cuda_range_close(void)
{
    note("pop", "");
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    (void)flags;
    *event = malloc(1);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    (void)event;
    fake.recorded = stream;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    (void)event;
    (void)flags;
    fake.waiting = stream;
    return cudaSuccess;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static cudaError_t take(void **pointer, size_t bytes)
{
    if (fake.failing_allocations > 0) {
        fake.failing_allocations--;
        return fake.pending = cudaErrorMemoryAllocation;
    }
    *pointer = malloc(bytes);
    fake.allocated++;
    return cudaSuccess;
}

static cudaError_t give_back(void *pointer, cudaStream_t stream)
{
    free(pointer);
    fake.allocated--;
    fake.freed_on = stream;
    return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties)
{
    static char place;
    (void)properties;
    *pool = (cudaMemPool_t)(void *)&place;
    fake.pools++;
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep)
{
    (void)pool;
    (void)keep;
    fake.trims++;
    return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t stream)
{
    (void)pool;
    (void)stream;
    return take(pointer, bytes);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
    return give_back(pointer, stream);
}

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    return take(pointer, bytes);
}

cudaError_t cudaFree(void *pointer)
{
    return give_back(pointer, NULL);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    memset(attributes, 0, sizeof *attributes);
    attributes->type = pointer == fake.page_locked ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)kind;
    (void)stream;
    memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    memset(to, value, bytes);
    return cudaSuccess;
}

/* --- kernels that were compiled at run time ---------------------------------------------------------------------- */

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **jit_values,
                                unsigned int jit_count, enum cudaLibraryOption *options, void **values,
                                unsigned int count)
{
    static char place;
    (void)code;
    (void)jit;
    (void)jit_values;
    (void)jit_count;
    (void)options;
    (void)values;
    (void)count;
    if (fake.load_says != cudaSuccess) {
        return fake.pending = fake.load_says;
    }
    *library = (cudaLibrary_t)(void *)&place;
    fake.libraries++;
    return cudaSuccess;
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library)
{
    (void)library;
    fake.libraries--;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
    static char place;
    (void)library;
    strncpy(fake.kernel, name, sizeof fake.kernel - 1);
    *kernel = (cudaKernel_t)(void *)&place;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetGlobal(void **pointer, size_t *bytes, cudaLibrary_t library, const char *name)
{
    (void)library;
    if (strcmp(name, "tchi_signature") != 0 || fake.signature == NULL) {
        return fake.pending = cudaErrorSymbolNotFound;
    }
    memcpy(pointer, &fake.signature, sizeof fake.signature);
    *bytes = fake.signature_bytes;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->sharedSizeBytes = (size_t)fake.static_shared;
    attributes->numRegs = fake.registers;
    attributes->maxThreadsPerBlock = fake.most_threads;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    (void)function;
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        fake.shared_allowed = value;
    }
    return cudaSuccess;
}

cudaError_t cudaFuncGetParamInfo(const void *function, size_t index, size_t *offset, size_t *size)
{
    (void)function;
    *offset = 8 * index;
    *size = fake.parameter_size;
    return cudaSuccess;
}

/* 2048 threads fit, and 8 blocks. */
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared)
{
    (void)function;
    (void)shared;
    *blocks = 2048 / threads < 8 ? 2048 / threads : 8;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream)
{
    (void)function;
    fake.launches++;
    fake.grid = grid;
    fake.block = block;
    fake.launch_shared = shared;
    fake.launch_arguments = arguments;
    fake.launch_stream = stream;
    fake.pending = fake.launch_says;
    return fake.launch_says;
}
