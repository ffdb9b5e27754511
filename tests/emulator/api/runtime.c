/* The CUDA runtime for emulated devices in host memory: errors, devices and memory. Streams and graphs are in
 * streams.c, custom kernels in libraries.c.
 *
 * TORCHIUM_EMULATOR_CAPABILITY, by default 9.0, sets the compute capability, and so the host's choice of kernels. */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cudaTypedefs.h>

#include "control.h"
#include "machine.h"

enum { PROCESSORS = 16, L2_BYTES = 50 << 20 };
static const size_t all_memory = (size_t)4 << 30;

emulator_control emulated;

static _Thread_local cudaError_t last_error;
static atomic_int kept_error;
static _Thread_local int current; /* device */
static int everything;            /* the target of handles */

/* --- errors ------------------------------------------------------------------------------------------------------ */

cudaError_t emulator_result(cudaError_t error)
{
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

void emulator_note_result(int failed)
{
    emulator_result(failed != 0 ? cudaErrorLaunchFailure : cudaSuccess);
}

void emulator_keep_error(void)
{
    int none = cudaSuccess;
    atomic_compare_exchange_strong(&kept_error, &none, (int)last_error);
    last_error = cudaSuccess;
}

cudaError_t emulator_kept_error(void)
{
    return (cudaError_t)kept_error;
}

cudaError_t emulator_fault_of(const char *function)
{
    emulator_fault *f = &emulated.fault;
    if (f->failures == 0 || strcmp(f->function, function) != 0 || f->passes-- > 0) {
        return cudaSuccess;
    }
    f->failures--;
    f->passes = 0;
    return f->error;
}

void emulator_note(const char *what, const char *name)
{
    size_t used = strlen(emulated.timeline);
    snprintf(emulated.timeline + used, sizeof emulated.timeline - used, "%s%s, ", what, name);
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error != cudaSuccess ? last_error : emulator_fault_of(__func__);
    last_error = cudaSuccess;
    return error;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} known_errors[] = {
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "not supported by the emulated device"},
};

static int find_error(cudaError_t error)
{
    for (int i = 0; i < (int)(sizeof known_errors / sizeof known_errors[0]); i++) {
        if (known_errors[i].error == error) {
            return i;
        }
    }
    return -1;
}

/* A failed kernel has its own message. */
const char *cudaGetErrorString(cudaError_t error)
{
    int i = find_error(error);
    return error == cudaErrorLaunchFailure ? emulator_message()
           : i >= 0                        ? known_errors[i].text
                                           : "error of the emulated device";
}

const char *cudaGetErrorName(cudaError_t error)
{
    int i = find_error(error);
    return error == cudaErrorLaunchFailure ? "cudaErrorLaunchFailure" : i >= 0 ? known_errors[i].name : "cudaError";
}

/* --- the device -------------------------------------------------------------------------------------------------- */

static int capability(int device)
{
    const char *wanted = getenv("TORCHIUM_EMULATOR_CAPABILITY");
    int major = 9;
    int minor = 0;
    if (wanted != NULL && sscanf(wanted, "%d.%d", &major, &minor) != 2) {
        major = 9, minor = 0;
    }
    return emulated.capability[device] > 0 ? emulated.capability[device] : 10 * major + minor;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = emulated.devices > 0 ? emulated.devices : 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    EMULATOR_FAULT();
    *device = current;
    return cudaSuccess;
}

static cudaError_t check_device(int device)
{
    int count = 0;
    cudaGetDeviceCount(&count);
    return emulator_result(device >= 0 && device < count ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaSetDevice(int device)
{
    cudaError_t error = check_device(device);
    current = error == cudaSuccess ? device : current;
    return error;
}

/* Bytes per block of Turing, Ampere and Hopper. */
static int shared_most(int device)
{
    return capability(device) < 80 ? 65536 : capability(device) < 90 ? 166912 : EMULATOR_SHARED_MOST;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device)
{
    if (check_device(device) != cudaSuccess) {
        return cudaErrorInvalidDevice;
    }
    switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = capability(device) / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = capability(device) % 10;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = PROCESSORS;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = shared_most(device);
        break;
    case cudaDevAttrL2CacheSize:
        *value = L2_BYTES;
        break;
    case cudaDevAttrMemoryPoolsSupported:
        *value = 1;
        break;
    default:
        return emulator_result(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    if (check_device(device) != cudaSuccess) {
        return cudaErrorInvalidDevice;
    }
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "emulated GPU");
    properties->major = capability(device) / 10;
    properties->minor = capability(device) % 10;
    properties->multiProcessorCount = PROCESSORS;
    properties->l2CacheSize = L2_BYTES;
    properties->sharedMemPerBlockOptin = (size_t)shared_most(device);
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* Bytes in use per device: pools must not hold more than it has. */
static size_t used_memory[EMULATOR_DEVICES];
enum { PAGE_LOCKED = -1 };

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct allocation {
    void *pointer;
    size_t bytes;
    int device; /* PAGE_LOCKED: of the host */
} allocation;

static allocation *allocations; /* unsorted: there are few */
static size_t allocation_count, allocation_room;

static int note_allocation(void *pointer, size_t bytes, int device)
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
    allocations[allocation_count++] = (allocation){pointer, bytes, device};
    if (device != PAGE_LOCKED) {
        used_memory[device] += bytes;
        emulated.blocks++;
    }
    return 1;
}

static const allocation *find_allocation(const void *pointer)
{
    for (size_t i = allocation_count; i-- > 0;) {
        if (allocations[i].pointer == pointer) {
            return &allocations[i];
        }
    }
    return NULL;
}

/* Of either kind: device memory or page-locked. */
static cudaError_t release(void *pointer)
{
    pthread_mutex_lock(&memory_lock);
    const allocation *found = find_allocation(pointer);
    if (found != NULL && found->device != PAGE_LOCKED) {
        used_memory[found->device] -= found->bytes;
        emulated.blocks--;
    }
    if (found != NULL) {
        allocations[found - allocations] = allocations[allocation_count - 1];
        allocation_count--;
    }
    pthread_mutex_unlock(&memory_lock);
    free(pointer);
    return cudaSuccess;
}

static int allocate(void **pointer, size_t bytes, int device)
{
    *pointer = NULL;
    pthread_mutex_lock(&memory_lock);
    int fits = device == PAGE_LOCKED || (bytes <= all_memory && used_memory[device] <= all_memory - bytes);
    int good = fits && posix_memalign(pointer, 256, bytes > 0 ? bytes : 1) == 0;
    if (good && !note_allocation(*pointer, bytes, device)) {
        free(*pointer);
        good = 0;
    }
    pthread_mutex_unlock(&memory_lock);
    return good;
}

/* Filled with NaN, to detect reads of uninitialized memory. */
cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    EMULATOR_FAULT();
    int good = allocate(pointer, bytes, current);
    if (good) {
        memset(*pointer, 0xFF, bytes);
    }
    return emulator_result(good ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *pointer)
{
    emulator_finish_all();
    return release(pointer);
}

__attribute__((destructor)) static void forget_all(void)
{
    free(allocations);
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties)
{
    *pool = (cudaMemPool_t)(void *)&everything;
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes)
{
    emulated.trims++;
    return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t stream)
{
    return emulator_breaks_capture(stream) ? emulator_result(cudaErrorStreamCaptureUnsupported)
                                           : cudaMalloc(pointer, bytes);
}

static void release_later(void *data)
{
    release(*(void **)data);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
    emulated.freed_on = stream;
    if (emulator_breaks_capture(stream)) {
        return emulator_result(cudaErrorStreamCaptureUnsupported);
    }
    emulator_submit(stream, release_later, &pointer, sizeof pointer);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    return emulator_result(allocate(pointer, bytes, PAGE_LOCKED) ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    return cudaMallocHost(pointer, bytes);
}

cudaError_t cudaFreeHost(void *pointer)
{
    emulator_finish_all();
    return release(pointer);
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    pthread_mutex_lock(&memory_lock);
    *available = all_memory - used_memory[current];
    *total = all_memory;
    pthread_mutex_unlock(&memory_lock);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    pthread_mutex_lock(&memory_lock);
    const allocation *found = find_allocation(pointer);
    attributes->type = found == NULL                  ? cudaMemoryTypeUnregistered
                       : found->device == PAGE_LOCKED ? cudaMemoryTypeHost
                                                      : cudaMemoryTypeDevice;
    pthread_mutex_unlock(&memory_lock);
    return cudaSuccess;
}

/* --- copies ------------------------------------------------------------------------------------------------------ */

typedef struct copied_rows {
    void *to;
    const void *from;
    size_t to_pitch, from_pitch, width, height;
} copied_rows;

static void copy_rows(void *data)
{
    const copied_rows *c = data;
    const char *from = c->from != NULL ? c->from : (const char *)(c + 1);
    for (size_t i = 0; i < c->height; i++) {
        memmove((char *)c->to + i * c->to_pitch, from + i * c->from_pitch, c->width);
    }
}

static int is_pageable(const void *pointer)
{
    struct cudaPointerAttributes attributes;
    cudaPointerGetAttributes(&attributes, pointer);
    return attributes.type == cudaMemoryTypeUnregistered;
}

/* Pageable memory is staged before the call returns. */
static void submit_staged(const copied_rows *copy, cudaStream_t stream)
{
    size_t bytes = copy->width * copy->height;
    copied_rows *staged = malloc(sizeof *staged + bytes);
    copied_rows stage = *copy;
    stage.to = staged + 1;
    stage.to_pitch = copy->width;
    copy_rows(&stage);
    *staged = *copy;
    staged->from = NULL;
    staged->from_pitch = copy->width;
    emulator_submit(stream, copy_rows, staged, sizeof *staged + bytes);
    free(staged);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    copied_rows copy = {to, from, to_pitch, from_pitch, width, height};
    int asynchronous = stream != NULL && stream->queue != NULL;
    if (asynchronous && kind == cudaMemcpyHostToDevice && is_pageable(from)) {
        submit_staged(&copy, stream);
        return cudaSuccess;
    }
    emulator_submit(stream, copy_rows, &copy, sizeof copy);
    return asynchronous && kind == cudaMemcpyDeviceToHost && is_pageable(to) ? cudaStreamSynchronize(stream)
                                                                             : cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

typedef struct filled_bytes {
    void *to;
    size_t bytes;
    int value;
} filled_bytes;

static void fill_bytes(void *data)
{
    const filled_bytes *f = data;
    memset(f->to, f->value, f->bytes);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    filled_bytes fill = {to, bytes, value};
    emulator_submit(stream, fill_bytes, &fill, sizeof fill);
    return cudaSuccess;
}

/* --- kernels ----------------------------------------------------------------------------------------------------- */

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    int good = attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value <= shared_most(current);
    emulated.shared_allowed =
        attribute == cudaFuncAttributeMaxDynamicSharedMemorySize ? value : emulated.shared_allowed;
    return emulator_result(function != NULL && good ? cudaSuccess : cudaErrorInvalidValue);
}

/* --- tensor maps ------------------------------------------------------------------------------------------------- */

/* The driver's checks, and the subset that copies.c supports: three dimensions, box rows of 128 bytes. */
static CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                             const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                             const cuuint32_t *every, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    int32_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    int good = rank == 3 && (uintptr_t)address % 16 == 0 && strides[0] % 16 == 0 && strides[1] % 16 == 0 &&
               box[0] * (cuuint32_t)bytes == 128 && box[1] <= 256 && box[2] == 1 && every[0] == 1 && every[1] == 1 &&
               swizzle == CU_TENSOR_MAP_SWIZZLE_128B && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE;
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
    if (strcmp(name, "cuTensorMapEncodeTiled") != 0) {
        *found = cudaDriverEntryPointSymbolNotFound;
        return cudaSuccess;
    }
    memcpy(function, &encode, sizeof encode);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
