/* The symmetric product in bfloat16 for sm_90, by wgmma, which takes both operands from shared memory and runs in the
 * background. The one thing to know before changing the main loop: a stage may be filled again only after EVERY
 * warpgroup has waited for its own wgmma on it, and what cp.async wrote may be read by wgmma only after every thread has
 * published its part and met the others. */
#include "symmetric_split.cuh"

#define SIZE 128 /* of a tile: 64 rows for each of two warpgroups */
#define THREADS 256
#define STAGES 3
#define BLOCKS 2 /* on a multiprocessor, 96 KiB of shared memory each */
#define STAGE_BYTES (2 * SIZE * TCHI_SPLIT_ROW_BYTES)
#define PIECES 2 /* into which a tile of the last round is cut, side by side */

template <int count> static __device__ inline void wgmma(float (&sum)[count], uint64_t a, uint64_t b)
{
    if constexpr (count == 64) {
        tchi_wgmma_bf16_n128(sum, a, b);
    } else {
        tchi_wgmma_bf16_n64(sum, a, b);
    }
}

/* All products of one slab, started in the background as one group. A step of 16 along k is 32 bytes of a row, and the
 * low parts begin in its middle; addresses in descriptors count 16 bytes. */
template <int planes, int count> static __device__ inline void start_slab(float (&sum)[count], uint64_t a, uint64_t b)
{
    constexpr int low = 4;
    tchi_wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < 8 / planes; chunk += 2) {
        wgmma(sum, a + chunk, b + chunk);
        if (planes == 2) {
            wgmma(sum, a + chunk, b + chunk + low);
            wgmma(sum, a + chunk + low, b + chunk);
        }
    }
    tchi_wgmma_commit();
}

/* The sums of SIZE rows by `width` columns of C, left in shared memory, where all threads see them. */
template <int width, int planes>
static __device__ inline void multiply(const tchi_split_problem &p, const tchi_split_tile &tile, char *shared)
{
    int group = (int)threadIdx.x / 128;
    float sum[width / 2] = {};
    int slabs = (p.k + tchi_split_slab<planes>::depth - 1) / tchi_split_slab<planes>::depth;
    for (int s = 0; s < STAGES - 1; s++) {
        tchi_split_load<SIZE, width, THREADS, planes>(shared + s * STAGE_BYTES, p, tile, s);
    }
    for (int s = 0; s < slabs; s++) {
        char *stage = shared + s % STAGES * STAGE_BYTES;
        tchi_cp_async_wait<STAGES - 2>();
        tchi_wgmma_publish();
        __syncthreads(); /* slab s has landed for all */
        start_slab<planes>(sum, tchi_wgmma_rows(stage + group * 64 * TCHI_SPLIT_ROW_BYTES),
                           tchi_wgmma_rows(stage + SIZE * TCHI_SPLIT_ROW_BYTES));
        tchi_wgmma_wait<1>();
        __syncthreads(); /* all have done with slab s - 1 */
        tchi_split_load<SIZE, width, THREADS, planes>(shared + (s + STAGES - 1) % STAGES * STAGE_BYTES, p, tile,
                                                      s + STAGES - 1);
    }
    tchi_wgmma_wait<0>();
    __syncthreads();
    int row = (int)threadIdx.x / 32 * 16;
#pragma unroll
    for (int j = 0; j < width / 8; j++) {
        tchi_split_stage<width>((float *)shared, row, 8 * j, sum[4 * j], sum[4 * j + 1], sum[4 * j + 2],
                                sum[4 * j + 3]);
    }
    __syncthreads();
}

/* The two numbers are those of symmetric_split_mma. Blocks beyond p.whole compute the tiles that are left in pieces; one
 * on the diagonal stays whole, and its other blocks have nothing to do. */
template <int planes>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    symmetric_split_wgmma(const __grid_constant__ tchi_split_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    extern __shared__ __align__(1024) char shared[];
    bool cut = blockIdx.x >= p.whole;
    unsigned later = cut ? (unsigned)(blockIdx.x - p.whole) : 0;
    tchi_split_tile tile = tchi_split_tile_of(p, SIZE, cut ? (unsigned)p.whole + later / PIECES : blockIdx.x);
    if (!cut || tile.row == tile.col) {
        if (later % PIECES == 0) {
            multiply<SIZE, planes>(p, tile, shared);
            tchi_split_write<SIZE, THREADS, planes>(p, tile, (float *)shared);
        }
        return;
    }
    tile.col += (int)(later % PIECES) * (SIZE / PIECES);
    multiply<SIZE / PIECES, planes>(p, tile, shared);
    tchi_split_write_part<SIZE, SIZE / PIECES, THREADS, planes>(p, tile, (float *)shared);
#endif
}

tch_status tchi_cuda_split_wgmma(tchi_cuda_state *state, tchi_split_problem *problem, int64_t batch)
{
    problem->tiles = (int32_t)tchi_split_tile_count(problem->n, SIZE);
    tchi_split_kernel kernel =
        problem->a.type == TCH_SCALAR_BF16X2 ? symmetric_split_wgmma<2> : symmetric_split_wgmma<1>;
    return tchi_split_launch(state, kernel, "symmetric_split_wgmma", problem, batch, THREADS, STAGES * STAGE_BYTES,
                             PIECES, (int64_t)BLOCKS * state->device.processors);
}
