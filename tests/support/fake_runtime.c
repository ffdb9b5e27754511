/* See fake_runtime.h. Device memory is malloc's, so that AddressSanitizer would see what is freed twice. */
#include "fake_runtime.h"

#include <stdlib.h>
#include <string.h>

fake_runtime fake;

void fake_runtime_reset(void)
{
    fake = (fake_runtime){.devices = 2, .capability = {90, 90}, .has_pools = 1};
}

/* --- errors and devices ------------------------------------------------------------------------------------------- */

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

/* --- streams and events ------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    *stream = malloc(sizeof **stream);
    (*stream)->device = fake.current;
    fake.streams++;
    return cudaSuccess;
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

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    fake.synchronized++;
    fake.bad_waits += stream != NULL && stream == fake.captured;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    if (stream == NULL && fake.captured != NULL) {
        return fake.pending = cudaErrorStreamCaptureImplicit;
    }
    *status = stream != NULL && stream == fake.captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    (void)mode;
    return cudaSuccess;
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

/* --- memory ------------------------------------------------------------------------------------------------------- */

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
