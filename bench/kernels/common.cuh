/* What a laboratory of kernels needs: the few functions of the module that kernels call, a clock, and matrices full of
 * noise. Any failure ends the program, which has nothing to save. */
#ifndef BENCH_COMMON_CUH
#define BENCH_COMMON_CUH

#include <algorithm>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include <cuda_runtime.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"

/* --- what the rest of the module would offer --------------------------------------------------------------------- */

static tch_status bench_fail(tch_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    return status;
}

static const tch_backend_host bench_host = {sizeof bench_host, bench_fail, NULL, NULL};
const tch_backend_host *tchi_cuda_host = &bench_host;

static void must(cudaError_t error, const char *what)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

static void must(tch_status status, const char *what)
{
    if (status != TCH_OK) {
        fprintf(stderr, "%s failed\n", what);
        exit(1);
    }
}

tch_status tchi_cuda_check(cudaError_t error, const char *what)
{
    must(error, what);
    return TCH_OK;
}

tch_status tchi_cuda_launched(const tchi_cuda_state *, const char *kernel)
{
    return tchi_cuda_check(cudaGetLastError(), kernel);
}

/* The first GPU, with a stream of its own for what is timed; the default stream, on which checks run, waits for it. */
static inline tchi_cuda_state this_device()
{
    cudaDeviceProp found;
    tchi_cuda_state state = {};
    must(cudaGetDeviceProperties(&found, 0), "cudaGetDeviceProperties");
    must(cudaStreamCreate(&state.stream), "cudaStreamCreate");
    state.device.major = found.major;
    state.device.minor = found.minor;
    state.device.processors = found.multiProcessorCount;
    state.device.shared_per_block = (int64_t)found.sharedMemPerBlockOptin;
    state.device.l2_bytes = found.l2CacheSize;
    printf("%s, %d multiprocessors, %.0f MB of L2\n", found.name, found.multiProcessorCount, found.l2CacheSize / 1e6);
    return state;
}

/* --- time -------------------------------------------------------------------------------------------------------- */

/* The median of 20 times between two events, in ms, after three that are not counted. */
template <typename function> static double median_ms(cudaStream_t stream, function call)
{
    std::vector<float> times;
    cudaEvent_t from, to;
    must(cudaEventCreate(&from), "cudaEventCreate");
    must(cudaEventCreate(&to), "cudaEventCreate");
    for (int i = -3; i < 20; i++) {
        float ms;
        must(cudaEventRecord(from, stream), "cudaEventRecord");
        call();
        must(cudaEventRecord(to, stream), "cudaEventRecord");
        must(cudaEventSynchronize(to), "a kernel");
        must(cudaEventElapsedTime(&ms, from, to), "cudaEventElapsedTime");
        if (i >= 0) {
            times.push_back(ms);
        }
    }
    must(cudaEventDestroy(from), "cudaEventDestroy");
    must(cudaEventDestroy(to), "cudaEventDestroy");
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

/* --- data -------------------------------------------------------------------------------------------------------- */

template <typename T> static T *device_array(int64_t count)
{
    void *pointer = NULL;
    must(cudaMalloc(&pointer, (size_t)count * sizeof(T)), "cudaMalloc");
    return (T *)pointer;
}

/* A number in [-1, 1) that depends on the index alone. */
static __host__ __device__ inline double noise(uint64_t index)
{
    uint64_t x = (index + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (double)(int64_t)(x ^ (x >> 31)) * 0x1p-63;
}

static inline int64_t planes_of(tch_scalar type)
{
    return type == TCH_SCALAR_BF16X2 ? 2 : 1;
}

/* A batch in memory of its own, all bytes 0xFF, NaN in every type, padding included; `shift` elements off alignment. */
static inline tch_matrices make_poisoned(tch_scalar type, int64_t rows, int64_t cols, int64_t ld, int64_t batch,
                                         int64_t stride, int64_t shift)
{
    int64_t size = tchi_cuda_size(type), bytes = (stride * planes_of(type) * batch + shift + 64) * size;
    char *data = device_array<char>(bytes);
    must(cudaMemset(data, 0xFF, (size_t)bytes), "cudaMemset");
    return {data + shift * size, type, rows, cols, ld, batch, stride};
}

static inline void drop(const tch_matrices *m, int64_t shift)
{
    must(cudaFree((char *)m->data - shift * tchi_cuda_size(m->type)), "cudaFree");
}

static __global__ void noise_kernel(tchi_cuda_operand m, int64_t rows, int64_t cols, int64_t batch, uint64_t seed,
                                    int symmetric)
{
    int64_t count = rows * cols * batch;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < count; e += (int64_t)gridDim.x * blockDim.x) {
        int64_t b = e / cols / rows, i = e / cols % rows, j = e % cols;
        int64_t mirror = (b * rows + j) * cols + i;
        float value = (float)noise((seed << 40) + (uint64_t)(symmetric ? min(e, mirror) : e));
        tchi_cuda_store<float>(m.type, tchi_cuda_at(m, b, i, j), 0, m.stride, value);
    }
}

/* Noise in every element, and nothing between them. */
static inline void fill_noise(const tch_matrices *m, uint64_t seed, int symmetric)
{
    noise_kernel<<<1024, 256>>>(tchi_cuda_operand_of(m), m->rows, m->cols, m->batch, seed, symmetric);
    must(cudaGetLastError(), "noise_kernel");
}

#endif
