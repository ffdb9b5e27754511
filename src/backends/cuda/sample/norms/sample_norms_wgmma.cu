/* Squared norms of per-sample gradients in half types for sm_90, in tile form: |X' Y|^2 with the tiles of
 * wgmma_tiles.cuh. Squares are summed where the products are, in registers, so that nothing is ever written but a
 * number for each warp and tile. */
#include "backends/cuda/device/wgmma_tiles.cuh"
#include "sample_norms.h"

typedef struct wgmma_problem {
    tchi_wgmma_pair pair;
    int32_t across, tiles; /* tiles in a row, and of a sample */
    double *parts;
} wgmma_problem;

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA

static __device__ __forceinline__ double squares_of(const float (&sum)[128])
{
    float total[4] = {};
#pragma unroll
    for (int i = 0; i < 128; i++) {
        total[i % 4] += sum[i] * sum[i];
    }
    return tchi_cuda_warp_sum((double)((total[0] + total[1]) + (total[2] + total[3])));
}

#endif

/* 2 T p d operations a sample; (p + d) T elements move, and from the L2 cache 384 T for a tile. For 8 samples of 768 to
 * 3072 with T = 1024: 38.7 GFLOP, 0.051 ms at the 757 TFLOP/s of cuBLAS; 63 MB. */
template <tch_scalar type>
static __global__ void __launch_bounds__(TCHI_WGMMA_THREADS, 1)
    sample_norms_wgmma(const __grid_constant__ wgmma_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    extern __shared__ __align__(1024) char shared[];
    auto work_of = [&](int item) {
        int tile = item % p.tiles;
        return tchi_wgmma_work{tile / p.across * TCHI_WGMMA_ROWS, tile % p.across * TCHI_WGMMA_COLS, item / p.tiles};
    };
    tchi_wgmma_tiles<type>(shared, p.pair, work_of, [&](int item, const tchi_wgmma_work &, float(&sum)[128]) {
        double total = squares_of(sum);
        if (threadIdx.x % 32 == 0) {
            p.parts[(int64_t)item * TCHI_WGMMA_WARPS + threadIdx.x / 32] = total;
        }
    });
#endif
}

static int64_t tiles_of(int64_t x, int64_t y)
{
    return tchi_cuda_ceil_div(x, TCHI_WGMMA_ROWS) * tchi_cuda_ceil_div(y, TCHI_WGMMA_COLS);
}

bool tchi_cuda_sample_norms_wgmma_takes(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g)
{
    const int64_t most = (int64_t)1 << 30;
    return tiles_of(g->cols, a->cols) < most / a->batch && tiles_of(a->cols, g->cols) < most / a->batch &&
           tchi_wgmma_takes(state, a) && tchi_wgmma_takes(state, g);
}

/* A gradient and its transpose have one norm: whichever has fewer tiles. */
tch_status tchi_cuda_sample_norms_wgmma(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                        double *parts, int64_t *tiles)
{
    bool exchanged = tiles_of(a->cols, g->cols) < tiles_of(g->cols, a->cols);
    const tch_matrices *x = exchanged ? a : g;
    const tch_matrices *y = exchanged ? g : a;
    wgmma_problem p = {};
    p.across = (int32_t)tchi_cuda_ceil_div(y->cols, TCHI_WGMMA_COLS);
    p.tiles = (int32_t)tiles_of(x->cols, y->cols);
    p.parts = parts;
    *tiles = (int64_t)p.tiles * TCHI_WGMMA_WARPS;
    TCHI_CUDA_PASS(tchi_wgmma_describe(x, y, p.tiles * a->batch, &p.pair));
    return tchi_wgmma_launch(
        state, a->type == TCH_SCALAR_BF16 ? sample_norms_wgmma<TCH_SCALAR_BF16> : sample_norms_wgmma<TCH_SCALAR_F16>, p,
        p.pair.items, "sample_norms_wgmma");
}
