/* Squared norms of per-sample gradients in half types for sm_90, in tile form: |X' Y|^2 by a persistent GEMM
 * (persistent_gemm.cuh) whose operands are given by columns. Squares are summed where the products are, in registers,
 * so that nothing is ever written but a number for each warp and tile. */
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/persistent_gemm.cuh"
#include "sample_norms.h"

#define ROWS 128 /* of a tile: columns of X, 64 for each warpgroup */
#define COLS TCHI_NORMS_TILE_COLS
#define DEPTH 64 /* steps of the contraction in a k-tile */
#define BOX_BYTES (DEPTH * TCHI_CUDA_BOX_COLS * 2)
#define X_BOXES (ROWS / TCHI_CUDA_BOX_COLS)
#define BOXES (X_BOXES + COLS / TCHI_CUDA_BOX_COLS)
#define STAGES 4
#define WARPS (TCHI_GEMM_CONSUMERS / 32)

typedef struct tiles_problem {
    int32_t items, ktiles;
    int32_t across, tiles; /* tiles in a row, and of a sample */
    double *parts;
    CUtensorMap x, y;
} tiles_problem;

typedef struct tiles_tile {
    int row, col, matrix;
} tiles_tile;

static __device__ __forceinline__ double squares_of(const float (&sum)[128])
{
    float total[4] = {};
#pragma unroll
    for (int i = 0; i < 128; i++) {
        total[i % 4] += sum[i] * sum[i];
    }
    return tchi_cuda_warp_sum((double)((total[0] + total[1]) + (total[2] + total[3])));
}

template <tch_scalar type> struct tiles_gemm : tchi_gemm<STAGES, 1, false, false> {
    using problem = tiles_problem;
    struct memory {
        char stage[STAGES][BOXES][BOX_BYTES]; /* X's boxes, then Y's */
        tchi_ring<STAGES> ring;
    };

    static __device__ __forceinline__ tiles_tile tile_of(const tiles_problem &p, int item, int)
    {
        int tile = item % p.tiles;
        return {tile / p.across * ROWS, tile % p.across * COLS, item / p.tiles};
    }

    static __device__ __forceinline__ void load(const tiles_problem &p, memory &m, int stage, const tiles_tile &t, int,
                                                int ktile)
    {
        uint64_t *full = m.ring.full + stage;
        tchi_barrier_arrive_expecting(full, BOXES * BOX_BYTES);
#pragma unroll
        for (int box = 0; box < BOXES; box++) {
            bool of_x = box < X_BOXES;
            int from = of_x ? t.row + box * TCHI_CUDA_BOX_COLS : t.col + (box - X_BOXES) * TCHI_CUDA_BOX_COLS;
            tchi_tma_load(m.stage[stage][box], of_x ? &p.x : &p.y, from, ktile * DEPTH, t.matrix, full);
        }
    }

    /* A step of 16 along the contraction is 16 rows of 128 bytes, and addresses in descriptors count 16. */
    static __device__ __forceinline__ void start(const tiles_problem &, memory &m, int stage, int group,
                                                 float (&sum)[1][128], tchi_no_fragment &, int add)
    {
        uint64_t x = tchi_wgmma_columns(m.stage[stage][group], BOX_BYTES);
        uint64_t y = tchi_wgmma_columns(m.stage[stage][X_BOXES], BOX_BYTES);
        tchi_wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            tchi_wgmma<type, true>(sum[0], x + k * 128, y + k * 128, k > 0 ? 1 : add);
        }
    }

    static __device__ __forceinline__ void compute(const tiles_problem &p, memory &m, const tiles_tile &, int group,
                                                   int i, tchi_ring_place *at)
    {
        float sum[1][128];
        int last = tchi_gemm_multiply<tiles_gemm>(p, m, group, sum, p.ktiles, at);
        tchi_gemm_finish<tiles_gemm>(m, sum, last);
        double total = squares_of(sum[0]);
        if (threadIdx.x % 32 == 0) {
            p.parts[(int64_t)tchi_gemm_item<tiles_gemm>(i) * WARPS + threadIdx.x / 32] = total;
        }
    }
};

/* 2 T p d operations a sample; (p + d) T elements move, and from the L2 cache 384 T for a tile. For 8 samples of 768 to
 * 3072 with T = 1024: 38.7 GFLOP, 0.051 ms at the 757 TFLOP/s of cuBLAS; 63 MB. */
template <class gemm>
static __global__ void __launch_bounds__(gemm::threads, 1) sample_norms_wgmma(const __grid_constant__ tiles_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    tchi_gemm_run<gemm>(p);
#endif
}

static int64_t tiles_of(int64_t x, int64_t y)
{
    return tchi_cuda_ceil_div(x, ROWS) * tchi_cuda_ceil_div(y, COLS);
}

bool tchi_cuda_sample_norms_wgmma_supported(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g)
{
    const int64_t most = (int64_t)1 << 30;
    return tchi_cuda_kernel_fits(state, TCHI_NORMS_WGMMA, a, NULL) && tiles_of(g->cols, a->cols) < most / a->batch &&
           tiles_of(a->cols, g->cols) < most / a->batch && tchi_cuda_tensor_map_supported(a, 2) &&
           tchi_cuda_tensor_map_supported(g, 2);
}

template <tch_scalar type> static tch_status launch_tiles(const tchi_cuda_state *state, const tiles_problem &p)
{
    return tchi_gemm_launch<tiles_gemm<type>>(state, "sample_norms_wgmma", sample_norms_wgmma<tiles_gemm<type>>, p);
}

/* A gradient and its transpose have one norm: whichever has fewer tiles. */
tch_status tchi_cuda_sample_norms_wgmma(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                        double *parts, int64_t *tiles)
{
    bool exchanged = tiles_of(a->cols, g->cols) < tiles_of(g->cols, a->cols);
    const tch_matrices *x = exchanged ? a : g;
    const tch_matrices *y = exchanged ? g : a;
    tiles_problem p = {};
    p.across = (int32_t)tchi_cuda_ceil_div(y->cols, COLS);
    p.tiles = (int32_t)tiles_of(x->cols, y->cols);
    p.items = (int32_t)(p.tiles * a->batch);
    p.ktiles = (int32_t)tchi_cuda_ceil_div(x->rows, DEPTH);
    p.parts = parts;
    *tiles = (int64_t)p.tiles * WARPS;
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(x, DEPTH, &p.x));
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(y, DEPTH, &p.y));
    return a->type == TCH_SCALAR_BF16 ? launch_tiles<TCH_SCALAR_BF16>(state, p)
                                      : launch_tiles<TCH_SCALAR_F16>(state, p);
}
