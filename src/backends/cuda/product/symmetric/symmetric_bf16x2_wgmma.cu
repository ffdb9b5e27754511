/* The symmetric product in bfloat16 for sm_90, C = c0 I + c1 D + c2 A B' as in symmetric_bf16x2.cu, by wgmma, which
 * reads both operands from shared memory and runs asynchronously. The one thing to know before changing the main loop:
 * a stage may be refilled only after EVERY warpgroup has waited for its own wgmma on it, and wgmma may read data of
 * cp.async only after every thread has fenced its part and passed a barrier. */
#include "backends/cuda/device/hopper.cuh"
#include "symmetric_bf16x2.cuh"

#define SIZE 128 /* of a tile: 64 rows for each of two warpgroups */
#define THREADS 256
#define STAGES 3
#define BLOCKS 2 /* on a multiprocessor, 96 KiB of shared memory each: one writes its tile while the other multiplies */
#define STAGE_BYTES (2 * SIZE * TCHI_BF16X2_ROW_BYTES)

/* All products of one k-tile, issued as one asynchronous group. A step of 16 along k is 32 bytes of a row, and low
 * parts begin in its middle; descriptor addresses are in units of 16 bytes. */
template <int planes> static __device__ inline void start_ktile(float (&sum)[64], uint64_t a, uint64_t b)
{
    constexpr int low = 4;
    tchi_wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < 8 / planes; chunk += 2) {
        tchi_wgmma<TCH_SCALAR_BF16>(sum, a + chunk, b + chunk, 1);
        if (planes == 2) {
            tchi_wgmma<TCH_SCALAR_BF16>(sum, a + chunk, b + chunk + low, 1);
            tchi_wgmma<TCH_SCALAR_BF16>(sum, a + chunk + low, b + chunk, 1);
        }
    }
    tchi_wgmma_commit();
}

/* Leaves the sums of a tile of C in shared memory, visible to all threads. */
template <int planes>
static __device__ inline void run_wgmma_tile(const tchi_bf16x2_problem &p, const tchi_bf16x2_tile &tile, char *shared)
{
    int group = (int)threadIdx.x / 128;
    float sum[64] = {};
    int ktiles = (p.k + tchi_bf16x2_ktile<planes>::depth - 1) / tchi_bf16x2_ktile<planes>::depth;
    for (int s = 0; s < STAGES - 1; s++) {
        tchi_bf16x2_load<SIZE, THREADS, planes>(shared + s * STAGE_BYTES, p, tile, s);
    }
    for (int s = 0; s < ktiles; s++) {
        char *stage = shared + s % STAGES * STAGE_BYTES;
        tchi_cp_async_wait<STAGES - 2>();
        tchi_tma_publish();
        __syncthreads(); /* k-tile s has landed for all */
        start_ktile<planes>(sum, tchi_wgmma_rows(stage + group * 64 * TCHI_BF16X2_ROW_BYTES),
                            tchi_wgmma_rows(stage + SIZE * TCHI_BF16X2_ROW_BYTES));
        tchi_wgmma_wait<1>();
        __syncthreads(); /* k-tile s - 1 is no longer in use */
        tchi_bf16x2_load<SIZE, THREADS, planes>(shared + (s + STAGES - 1) % STAGES * STAGE_BYTES, p, tile,
                                                s + STAGES - 1);
    }
    tchi_wgmma_wait<0>();
    __syncthreads();
    int row = (int)threadIdx.x / 32 * 16;
#pragma unroll
    for (int j = 0; j < SIZE / 8; j++) {
        tchi_bf16x2_stage<SIZE>((float *)shared, row, 8 * j, sum[4 * j], sum[4 * j + 1], sum[4 * j + 2],
                                sum[4 * j + 3]);
    }
    __syncthreads();
}

/* The same limits as for symmetric_bf16x2_mma. */
template <int planes>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    symmetric_bf16x2_wgmma(const __grid_constant__ tchi_bf16x2_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    extern __shared__ __align__(1024) char shared[];
    tchi_bf16x2_tile tile = tchi_bf16x2_tile_of(p, SIZE);
    run_wgmma_tile<planes>(p, tile, shared);
    tchi_bf16x2_write<SIZE, THREADS, planes>(p, tile, (float *)shared);
#endif
}

tch_status tchi_cuda_split_wgmma(tchi_cuda_state *state, tchi_bf16x2_problem *problem, int64_t batch)
{
    problem->tiles = (int32_t)tchi_bf16x2_tile_count(problem->n, SIZE);
    tchi_bf16x2_kernel kernel =
        problem->a.type == TCH_SCALAR_BF16X2 ? symmetric_bf16x2_wgmma<2> : symmetric_bf16x2_wgmma<1>;
    return tchi_bf16x2_launch(state, kernel, "symmetric_bf16x2_wgmma", problem, batch, THREADS, STAGES * STAGE_BYTES);
}
