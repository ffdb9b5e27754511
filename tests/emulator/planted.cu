/* The faults are ones that kernels have had: keep them small. */
#include "planted.h"

#include "backends/cuda/device/hopper.cuh"

enum { THREADS = PLANTED_THREADS };

static __global__ void __launch_bounds__(THREADS) reverse_kernel(const float *in, float *out, int barrier)
{
    __shared__ float values[THREADS];
    values[threadIdx.x] = in[threadIdx.x];
    if (barrier) {
        __syncthreads();
    }
    out[threadIdx.x] = values[THREADS - 1 - threadIdx.x];
}

static __global__ void __launch_bounds__(THREADS) shift_kernel(const float *in, float *out, int barrier)
{
    __shared__ float values[THREADS];
    values[threadIdx.x] = in[threadIdx.x];
    if (barrier) {
        __syncthreads();
    }
    out[threadIdx.x] = threadIdx.x > 0 ? values[threadIdx.x - 1] : 0.0f;
}

static __global__ void __launch_bounds__(THREADS) overrun_kernel(int beyond)
{
    __shared__ float values[THREADS];
    values[(int)threadIdx.x + beyond] = 1.0f;
}

static __global__ void __launch_bounds__(THREADS) overrun_dynamic_kernel(int beyond)
{
    extern __shared__ __align__(16) float values[];
    values[(int)threadIdx.x + beyond] = 1.0f;
}

static __global__ void __launch_bounds__(THREADS) read_kernel(const float *in, float *out, int beyond)
{
    out[threadIdx.x] = in[(int)threadIdx.x + beyond];
}

/* Fragments as ptx.cuh describes them. */
static __global__ void __launch_bounds__(32) mma_kernel(const uint16_t *a, const uint16_t *b, float *c, int swapped)
{
    int g = (int)threadIdx.x / 4, t = (int)threadIdx.x % 4;
    uint32_t left[4], right[2];
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < 4; i++) {
        int row = g + i % 2 * 8, col = 2 * t + i / 2 * 8;
        left[i] = a[row * 16 + col] | (uint32_t)a[row * 16 + col + 1] << 16;
    }
    for (int i = 0; i < 2; i++) {
        int row = 2 * t + i * 8;
        right[i] = b[row * 8 + g] | (uint32_t)b[(row + 1) * 8 + g] << 16;
    }
    if (swapped) {
        uint32_t held = left[1];
        left[1] = left[2];
        left[2] = held;
    }
    tchi_mma_bf16(sum, left, right);
    for (int i = 0; i < 4; i++) {
        c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
    }
}

static __global__ void __launch_bounds__(THREADS) barrier_kernel(planted_barrier fault)
{
    extern __shared__ __align__(16) uint64_t barrier[];
    bool low = threadIdx.x < 16;
    if (fault == NO_ARRIVAL && threadIdx.x == 0) {
        tchi_barrier_create(barrier, 2);
    }
    __syncthreads();
    switch (fault) {
    case TWO_PLACES:
        if (low) {
            __syncthreads();
        } else {
            __syncthreads();
        }
        break;
    case BEHIND_SHUFFLE:
        if (low) {
            __shfl_sync(0xFFFFFFFFu, 1, 0);
        }
        __syncthreads();
        break;
    case HALF_A_NAMED_ONE:
        if (threadIdx.x < 32) {
            tchi_threads_sync(1, THREADS);
        }
        break;
    case NO_ARRIVAL:
        if (threadIdx.x == 0) {
            tchi_barrier_arrive(barrier);
        }
        tchi_barrier_wait(barrier, 0);
        break;
    case NEVER_CREATED:
        tchi_barrier_arrive(barrier);
        break;
    }
}

static __global__ void __launch_bounds__(16) copy_kernel(const float *in, float *out, int waits)
{
    __shared__ __align__(16) float values[64];
    tchi_cp_async_16(values + 4 * threadIdx.x, in + 4 * threadIdx.x, 16);
    tchi_cp_async_commit();
    if (waits) {
        tchi_cp_async_wait<0>();
    }
    __syncthreads();
    for (int i = 0; i < 4; i++) {
        out[i * 16 + threadIdx.x] = values[i * 16 + threadIdx.x];
    }
}

static __global__ void __launch_bounds__(32) cluster_kernel(int *out)
{
    __shared__ int number;
    int next = (tchi_cluster_rank() + 1) % tchi_cluster_size();
    if (threadIdx.x == 0) {
        number = (int)blockIdx.x;
    }
    tchi_cluster_sync();
    if (threadIdx.x == 0) {
        out[blockIdx.x] = *(const int *)tchi_cluster_map(&number, next);
    }
    tchi_cluster_sync();
}

static __global__ void __launch_bounds__(32) bounds_kernel()
{
    __syncwarp();
}

/* --- launches ---------------------------------------------------------------------------------------------------- */

cudaError_t planted_reverse(const float *in, float *out, int barrier)
{
    reverse_kernel<<<1, THREADS>>>(in, out, barrier);
    return cudaGetLastError();
}

cudaError_t planted_shift(const float *in, float *out, int barrier)
{
    shift_kernel<<<1, THREADS>>>(in, out, barrier);
    return cudaGetLastError();
}

cudaError_t planted_overrun(int beyond, int dynamic)
{
    if (dynamic) {
        overrun_dynamic_kernel<<<1, THREADS, THREADS * sizeof(float)>>>(beyond);
    } else {
        overrun_kernel<<<1, THREADS>>>(beyond);
    }
    return cudaGetLastError();
}

cudaError_t planted_read(const float *in, float *out, int beyond)
{
    read_kernel<<<1, THREADS>>>(in, out, beyond);
    return cudaGetLastError();
}

cudaError_t planted_mma(const uint16_t *a, const uint16_t *b, float *c, int swapped)
{
    mma_kernel<<<1, 32>>>(a, b, c, swapped);
    return cudaGetLastError();
}

cudaError_t planted_barriers(planted_barrier fault)
{
    barrier_kernel<<<1, THREADS, sizeof(uint64_t)>>>(fault);
    return cudaGetLastError();
}

cudaError_t planted_copy(const float *in, float *out, int waits)
{
    copy_kernel<<<1, 16>>>(in, out, waits);
    return cudaGetLastError();
}

cudaError_t planted_cluster(int *out)
{
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 4;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(8);
    config.blockDim = dim3(32);
    config.attrs = &cluster;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, cluster_kernel, out);
    return cudaGetLastError();
}

cudaError_t planted_bounds(int threads)
{
    bounds_kernel<<<1, (unsigned)threads>>>();
    return cudaGetLastError();
}
