/* The GPUs of this machine: how many are usable, why none is, and their properties. Devices keep CUDA's numbers, so
 * that "cuda:1" is the same GPU for PyTorch, even next to an unsupported one. */
#include "backends/cuda/cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The oldest GPUs this module has machine code for: Turing. */
enum { OLDEST_MAJOR = 7, OLDEST_MINOR = 5 };

static int new_enough(int32_t major, int32_t minor)
{
    return major > OLDEST_MAJOR || (major == OLDEST_MAJOR && minor >= OLDEST_MINOR);
}

static int capability(int32_t index, int *major, int *minor)
{
    return cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, index) == cudaSuccess &&
           cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, index) == cudaSuccess;
}

/* CUDA numbers its versions 1000 * major + 10 * minor. */
#define VERSION_FORMAT "%d.%d"
#define VERSION_PARTS(version) (version) / 1000, (version) % 1000 / 10

/* --- why there is no GPU ----------------------------------------------------------------------------------------- */

static void explain_driver(char *reason, size_t size)
{
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (driver == 0) {
        snprintf(reason, size,
                 "no NVIDIA driver is loaded (libcuda.so.1 was not found or does not start); install the driver, or in "
                 "a container run it with GPU access (docker run --gpus all)");
        return;
    }
    snprintf(reason, size,
             "the NVIDIA driver is too old: it is for CUDA " VERSION_FORMAT ", this module needs " VERSION_FORMAT
             " or newer; update the driver, or build Torchium with a CUDA toolkit no newer than the driver",
             VERSION_PARTS(driver), VERSION_PARTS(CUDART_VERSION));
}

static void explain_no_device(char *reason, size_t size)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible == NULL) {
        snprintf(reason, size, "the NVIDIA driver finds no GPU; look whether nvidia-smi lists one");
        return;
    }
    snprintf(reason, size,
             "CUDA_VISIBLE_DEVICES is \"%.64s\", which hides every GPU; unset it, or name GPUs that nvidia-smi lists",
             visible);
}

static void explain_error(cudaError_t error, char *reason, size_t size)
{
    switch (error) {
    case cudaErrorInsufficientDriver:
        explain_driver(reason, size);
        break;
    case cudaErrorNoDevice:
        explain_no_device(reason, size);
        break;
    case cudaErrorInitializationError:
        snprintf(reason, size,
                 "CUDA cannot start (%s); a process forked after its parent used CUDA cannot use it: start the process "
                 "by spawn instead of fork",
                 cudaGetErrorString(error));
        break;
    default:
        snprintf(reason, size, "CUDA cannot start: %s (%s); nvidia-smi may tell more", cudaGetErrorString(error),
                 cudaGetErrorName(error));
    }
}

static void explain_old_gpus(int count, char *reason, size_t size)
{
    struct cudaDeviceProp properties;
    int known = cudaGetDeviceProperties(&properties, 0) == cudaSuccess;
    snprintf(reason, size,
             "%s (%s, compute capability %d.%d) is older than what this module is built for, %d.%d; there is no newer "
             "GPU to use",
             count == 1 ? "the GPU" : "every GPU, such as the first", known ? properties.name : "unknown",
             known ? properties.major : 0, known ? properties.minor : 0, OLDEST_MAJOR, OLDEST_MINOR);
}

/* --- the devices ------------------------------------------------------------------------------------------------- */

static int any_new_enough(int count)
{
    int major = 0;
    int minor = 0;
    for (int i = 0; i < count; i++) {
        if (capability(i, &major, &minor) && new_enough(major, minor)) {
            return 1;
        }
    }
    return 0;
}

/* Checks driver and GPUs before cuBLAS: without a GPU the large library is not opened, and the reason given is the
 * first to fix. */
static int32_t count_devices(char *reason, size_t reason_size)
{
    int count = 0;
    const char *why = "";
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        cudaGetLastError();
        explain_error(error, reason, reason_size);
        return 0;
    }
    if (count == 0) {
        explain_no_device(reason, reason_size);
        return 0;
    }
    if (!any_new_enough(count)) {
        explain_old_gpus(count, reason, reason_size);
        return 0;
    }
    if (tchi_cublas_open(&why) == NULL) {
        snprintf(reason, reason_size, "%s", why);
        return 0;
    }
    return count;
}

/* One attribute of a device after another; the first failure stays in *status. */
static int64_t attribute(int32_t index, enum cudaDeviceAttr which, tch_status *status)
{
    int value = 0;
    if (*status == TCH_OK) {
        *status = tchi_cuda_check(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
    }
    return value;
}

tch_status tchi_cuda_device_read(int32_t index, tchi_cuda_device *device)
{
    tch_status status = TCH_OK;
    device->index = index;
    device->major = (int32_t)attribute(index, cudaDevAttrComputeCapabilityMajor, &status);
    device->minor = (int32_t)attribute(index, cudaDevAttrComputeCapabilityMinor, &status);
    device->processors = (int32_t)attribute(index, cudaDevAttrMultiProcessorCount, &status);
    device->shared_per_block = attribute(index, cudaDevAttrMaxSharedMemoryPerBlockOptin, &status);
    device->l2_bytes = attribute(index, cudaDevAttrL2CacheSize, &status);
    if (status == TCH_OK && !new_enough(device->major, device->minor)) {
        status = tchi_cuda_host->fail(TCH_ERR_UNAVAILABLE,
                                      "cuda:%d has compute capability %d.%d, older than %d.%d, the oldest supported; "
                                      "choose another GPU",
                                      index, device->major, device->minor, OLDEST_MAJOR, OLDEST_MINOR);
    }
    return status;
}

/* Free memory can be queried for the current device only. */
static tch_status read_memory(int32_t index, tch_device_info *info)
{
    int current = 0;
    size_t available = 0;
    size_t total = 0;
    TCHI_CUDA_TRY(cudaGetDevice(&current), "cudaGetDevice");
    TCHI_CUDA_TRY(cudaSetDevice(index), "cudaSetDevice");
    tch_status status = tchi_cuda_check(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
    cudaSetDevice(current);
    info->free_memory = (int64_t)available;
    info->total_memory = (int64_t)total;
    return status;
}

tch_status tchi_cuda_device_info(int32_t index, tch_device_info *info)
{
    struct cudaDeviceProp properties;
    TCHI_CUDA_TRY(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    snprintf(info->name, sizeof info->name, "%s", properties.name);
    snprintf(info->features, sizeof info->features, "sm_%d%d, %d MiB L2, %d KiB shared memory%s", properties.major,
             properties.minor, properties.l2CacheSize >> 20, (int)(properties.sharedMemPerBlockOptin >> 10),
             properties.ECCEnabled ? ", ECC" : "");
    info->compute_major = properties.major;
    info->compute_minor = properties.minor;
    info->processors = properties.multiProcessorCount;
    return read_memory(index, info);
}

static void describe_libraries(const tchi_cublas *blas, char *text, size_t text_size)
{
    char driver_text[16] = "none";
    int driver = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0) {
        snprintf(driver_text, sizeof driver_text, VERSION_FORMAT, VERSION_PARTS(driver));
    }
    int length = snprintf(text, text_size, "CUDA runtime " VERSION_FORMAT ", driver %s", VERSION_PARTS(CUDART_VERSION),
                          driver_text);
    if (blas != NULL && length > 0 && (size_t)length < text_size) {
        snprintf(text + length, text_size - (size_t)length, ", cuBLAS %d.%d.%d (%.300s)", blas->version / 10000,
                 blas->version / 100 % 100, blas->version % 100, blas->library);
    }
}

int32_t tchi_cuda_device_count(char *reason, size_t reason_size, char *libraries, size_t libraries_size)
{
    int32_t count = count_devices(reason, reason_size);
    if (libraries != NULL) {
        describe_libraries(count > 0 ? tchi_cublas_open(NULL) : NULL, libraries, libraries_size);
    }
    return count;
}
