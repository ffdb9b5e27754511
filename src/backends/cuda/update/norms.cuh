/* Largest elements and norms of blocks, for gather.cu, rotated.cu and rows.cu. */
#ifndef TCHI_CUDA_NORMS_CUH
#define TCHI_CUDA_NORMS_CUH

#include "updates.cuh"

/* --- the largest elements of blocks, which scale those of float16 ------------------------------------------------ */

/* Maximum bits per warp: one thread combines those of a block, since atomics of all warps to one address per matrix
 * would serialize. */
typedef uint32_t warp_maxima[TCHI_CUDA_UPDATE_THREADS / 32];

/* Elements beyond the rectangle are zero. */
template <typename real>
static __device__ inline void note_largest(const tchi_cuda_vec4s<real> &x, warp_maxima &of_warps)
{
    uint32_t most = 0;
#pragma unroll
    for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
        most = max(most, __float_as_uint((float)x.at[k / 4].v[k % 4]) & 0x7FFFFFFFu);
    }
    most = tchi_cuda_warp_max(most);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = most;
    }
}

/* *largest becomes the float32 bits of the largest absolute value; NaN propagates. */
static __device__ inline void keep_largest(const warp_maxima &of_warps, uint32_t *largest)
{
    uint32_t most = of_warps[0];
#pragma unroll
    for (int w = 1; w < TCHI_CUDA_UPDATE_THREADS / 32; w++) {
        most = max(most, of_warps[w]);
    }
    atomicMax(largest, most);
}

/* `largest` may be NULL. */
static inline tch_status clear_largest(const tchi_cuda_state *state, const tch_update *update, uint32_t *largest,
                                       const char *name)
{
    int64_t blocks = 0;
    for (int64_t k = 0; k < update->count; k++) {
        blocks = update->rects[k].block_index >= blocks ? update->rects[k].block_index + 1 : blocks;
    }
    if (largest == NULL || blocks == 0) {
        return TCH_OK;
    }
    return tchi_cuda_check(cudaMemsetAsync(largest, 0, (size_t)blocks * sizeof *largest, state->stream), name);
}

/* --- norms from partial sums ------------------------------------------------------------------------------------- */

#define MOST_RANGES 1024 /* 24 KB of a kernel's parameters */

/* Partial sums of one block. */
typedef struct norm_range {
    int64_t first, count;
    int64_t block;
} norm_range;

typedef struct norm_ranges {
    norm_range at[MOST_RANGES];
    int count;
} norm_ranges;

/* 8 bytes read for each partial sum, by one block of threads for each norm. */
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS)
    range_norms_kernel(const __grid_constant__ norm_ranges ranges, const int32_t *skip, const double *partial,
                       double *norms)
{
    __shared__ double shared[32];
    const norm_range &range = ranges.at[blockIdx.x];
    if (skip != NULL && *skip != 0) {
        return;
    }
    double sum = 0;
    for (int64_t i = threadIdx.x; i < range.count; i += TCHI_CUDA_UPDATE_THREADS) {
        sum += partial[range.first + i];
    }
    sum = tchi_cuda_block_sum(sum, (int)threadIdx.x, TCHI_CUDA_UPDATE_THREADS, shared);
    if (threadIdx.x == 0) {
        norms[range.block] = sqrt(sum);
    }
}

static inline tch_status launch_range_norms(const void *state, const norm_ranges &ranges, const int32_t *skip,
                                            const double *partial, double *norms)
{
    return tchi_cuda_launch(state, "range_norms", range_norms_kernel, (unsigned)ranges.count, TCHI_CUDA_UPDATE_THREADS,
                            ranges, skip, partial, norms);
}

#endif
