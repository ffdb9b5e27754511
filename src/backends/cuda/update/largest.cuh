/* The largest elements of blocks, by those who write them: what scales blocks of float16. */
#ifndef TCHI_CUDA_LARGEST_CUH
#define TCHI_CUDA_LARGEST_CUH

#include "updates.cuh"

/* The most bits of a thread's numbers, and then of each warp's: one thread brings those of a block together, since a
 * warp's atomics to the one place for a matrix would wait for each other. */
typedef uint32_t warp_maxima[TCHI_CUDA_UPDATE_THREADS / 32];

/* Zeros beyond the edge of a rectangle do not count. */
template <typename real>
static __device__ inline void note_largest(const tchi_cuda_vec4s<real> &x, warp_maxima &of_warps)
{
    uint32_t most = 0;
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            most = max(most, __float_as_uint((float)x.at[s].v[k]) & 0x7FFFFFFFu);
        }
    }
    most = tchi_cuda_warp_max(most);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = most;
    }
}

static __device__ inline void keep_largest(const warp_maxima &of_warps, uint32_t *largest)
{
    uint32_t most = of_warps[0];
#pragma unroll
    for (int w = 1; w < TCHI_CUDA_UPDATE_THREADS / 32; w++) {
        most = max(most, of_warps[w]);
    }
    atomicMax(largest, most);
}

static tch_status clear_largest(const tchi_cuda_state *state, const tch_update *update, uint32_t *largest,
                                const char *name)
{
    int64_t blocks = 0;
    for (int64_t k = 0; k < update->count; k++) {
        blocks = update->rects[k].block_index >= blocks ? update->rects[k].block_index + 1 : blocks;
    }
    return tchi_cuda_check(cudaMemsetAsync(largest, 0, (size_t)blocks * sizeof *largest, state->stream), name);
}

#endif
