/* Squared norms of per-sample gradients for sm_90, by persistent GEMMs (persistent_gemm.cuh) that sum squares of
 * products in registers: in tile form for half types, |X' Y|^2 with operands given by columns, and in Gram form for
 * float32, <A A', G G'> by the lower tiles of both.
 *
 * Tensor cores truncate float32 operands to 11 bits, which would make every norm about 0.1 % smaller; so the consumer
 * threads round a k-tile in place, while the previous one is being multiplied. */
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/persistent_gemm.cuh"
#include "sample_norms.h"

#define WARPS (TCHI_GEMM_CONSUMERS / 32)

typedef struct norms_problem {
    int32_t items, ktiles;
    int32_t across, tiles; /* tiles in a row, and of a sample */
    int32_t ktiles_a;      /* of A in Gram form, which precede those of G */
    float one;             /* added to A A': 1 with a bias, or 0 */
    double *parts, *sizes;
    CUtensorMap x, y; /* or A and G */
} norms_problem;

typedef struct norms_tile {
    int row, col, matrix;
} norms_tile;

/* 2 T p d operations per sample in tile form; (p + d) T elements from memory, and from L2 384 T per tile. For 8 samples
 * of 768 to 3072 with T = 1024: 38.7 GFLOP, 0.051 ms at the 757 TFLOP/s of cuBLAS; 63 MB. sample_norms_gram in
 * sample_norms_mma.cu has the numbers of the Gram form. */
template <class gemm>
static __global__ void __launch_bounds__(gemm::threads, 1) sample_norms_wgmma(const __grid_constant__ norms_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    tchi_gemm_run<gemm>(p);
#endif
}

template <class gemm> static tch_status launch_gemm(const tchi_cuda_state *state, const norms_problem &p)
{
    return tchi_gemm_launch<gemm>(state, "sample_norms_wgmma", sample_norms_wgmma<gemm>, p);
}

/* The sum of four interleaved sums over a warp. */
static __device__ __forceinline__ double warp_total(const float (&total)[4])
{
    return tchi_cuda_warp_sum((double)((total[0] + total[1]) + (total[2] + total[3])));
}

/* --- tile form --------------------------------------------------------------------------------------------------- */

#define ROWS 128 /* of a tile: columns of X, 64 for each warpgroup */
#define COLS TCHI_NORMS_TILE_COLS
#define DEPTH 64 /* steps of the contraction in a k-tile */
#define BOX_BYTES (DEPTH * TCHI_CUDA_BOX_COLS * 2)
#define X_BOXES (ROWS / TCHI_CUDA_BOX_COLS)
#define BOXES (X_BOXES + COLS / TCHI_CUDA_BOX_COLS)
#define STAGES 4

static __device__ __forceinline__ double squares_of(const float (&sum)[128])
{
    float total[4] = {};
#pragma unroll
    for (int i = 0; i < 128; i++) {
        total[i % 4] += sum[i] * sum[i];
    }
    return warp_total(total);
}

template <tch_scalar type> struct tiles_gemm : tchi_gemm<STAGES, 1, false, false> {
    using problem = norms_problem;
    struct memory {
        char stage[STAGES][BOXES][BOX_BYTES]; /* X's boxes, then Y's */
        tchi_ring<STAGES> ring;
    };

    static __device__ __forceinline__ norms_tile tile_of(const norms_problem &p, int item, int)
    {
        int tile = item % p.tiles;
        return {tile / p.across * ROWS, tile % p.across * COLS, item / p.tiles};
    }

    static __device__ __forceinline__ void load(const norms_problem &p, memory &m, int stage, const norms_tile &t, int,
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

    /* A step of 16 along the contraction is 16 rows of 128 bytes; descriptor addresses are in units of 16. */
    static __device__ __forceinline__ void start(const norms_problem &, memory &m, int stage, int group,
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

    static __device__ __forceinline__ void compute(const norms_problem &p, memory &m, const norms_tile &, int group,
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

/* A gradient and its transpose have one norm: whichever has fewer tiles. */
tch_status tchi_cuda_sample_norms_wgmma(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                        double *parts, int64_t *tiles)
{
    bool exchanged = tiles_of(a->cols, g->cols) < tiles_of(g->cols, a->cols);
    const tch_matrices *x = exchanged ? a : g;
    const tch_matrices *y = exchanged ? g : a;
    norms_problem p = {};
    p.across = (int32_t)tchi_cuda_ceil_div(y->cols, COLS);
    p.tiles = (int32_t)tiles_of(x->cols, y->cols);
    p.items = (int32_t)(p.tiles * a->batch);
    p.ktiles = (int32_t)tchi_cuda_ceil_div(x->rows, DEPTH);
    p.parts = parts;
    *tiles = (int64_t)p.tiles * WARPS;
    TCHI_TRY(tchi_cuda_tensor_map(x, DEPTH, &p.x));
    TCHI_TRY(tchi_cuda_tensor_map(y, DEPTH, &p.y));
    return a->type == TCH_SCALAR_BF16 ? launch_gemm<tiles_gemm<TCH_SCALAR_BF16>>(state, p)
                                      : launch_gemm<tiles_gemm<TCH_SCALAR_F16>>(state, p);
}

/* --- Gram form ---------------------------------------------------------------------------------------------------- */

#define GRAM_STAGES 6

/* Rounds a stage, or its first half, to TF32, to nearest. */
static __device__ __forceinline__ void round_ktile(char *stage, int bytes)
{
#pragma unroll 4
    for (int at = (int)threadIdx.x * 16; at < bytes; at += TCHI_GEMM_CONSUMERS * 16) {
        uint4 four = *(const uint4 *)(stage + at);
        *(uint4 *)(stage + at) = make_uint4(tchi_round_tf32(four.x), tchi_round_tf32(four.y), tchi_round_tf32(four.z),
                                            tchi_round_tf32(four.w));
    }
    tchi_tma_publish();
    tchi_threads_sync(1, TCHI_GEMM_CONSUMERS);
}

/* A warp's inner product of x + `one` and y, and the sum of the absolute values of its terms, in one pass since all
 * registers are in use. */
static __device__ __forceinline__ double dot_sums(const float (&x)[64], float one, const float (&y)[64], double *size)
{
    float total[4] = {};
    float sizes[4] = {};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        float value = x[i] + one;
        total[i % 4] += value * y[i];
        sizes[i % 4] += fabsf(value * y[i]);
    }
    *size = warp_total(sizes);
    return warp_total(total);
}

struct gram_gemm : tchi_gemm<GRAM_STAGES, 1, false, false> {
    using problem = norms_problem;
    struct memory {
        char stage[GRAM_STAGES][2][TCHI_GRAM_KTILE_BYTES];
        tchi_ring<GRAM_STAGES> ring;
    };

    static __device__ __forceinline__ norms_tile tile_of(const norms_problem &p, int item, int)
    {
        int tile = item % p.tiles;
        int above = (int)tchi_lower_row(tile);
        return {above * TCHI_GRAM_TILE, (tile - (int)tchi_lower_tiles(above)) * TCHI_GRAM_TILE, item / p.tiles};
    }

    static __device__ __forceinline__ void load(const norms_problem &p, memory &m, int stage, const norms_tile &t, int,
                                                int ktile)
    {
        uint64_t *full = m.ring.full + stage;
        const CUtensorMap *map = ktile < p.ktiles_a ? &p.x : &p.y;
        int operands = t.row == t.col ? 1 : 2;
        int x = (ktile < p.ktiles_a ? ktile : ktile - p.ktiles_a) * TCHI_GRAM_DEPTH;
        tchi_barrier_arrive_expecting(full, operands * TCHI_GRAM_KTILE_BYTES);
        tchi_tma_load(m.stage[stage][0], map, x, t.row, t.matrix, full);
        if (operands == 2) {
            tchi_tma_load(m.stage[stage][1], map, x, t.col, t.matrix, full);
        }
    }

    /* Descriptor addresses are in units of 16 bytes, and a step of 8 numbers is 32 bytes. */
    static __device__ __forceinline__ void start(const norms_problem &, memory &m, int stage, bool diagonal,
                                                 float (&sum)[1][64], tchi_no_fragment &, int add)
    {
        round_ktile(m.stage[stage][0], (diagonal ? 1 : 2) * TCHI_GRAM_KTILE_BYTES);
        uint64_t x = tchi_wgmma_rows(m.stage[stage][0] + tchi_warpgroup() * (TCHI_GRAM_KTILE_BYTES / 2));
        uint64_t y = tchi_wgmma_rows(m.stage[stage][diagonal ? 0 : 1]);
        tchi_wgmma_fence();
#pragma unroll
        for (int k = 0; k < TCHI_GRAM_DEPTH / 8; k++) {
            tchi_wgmma<TCH_SCALAR_F32>(sum[0], x + 2 * k, y + 2 * k, k > 0 ? 1 : add);
        }
    }

    static __device__ __forceinline__ void compute(const norms_problem &p, memory &m, const norms_tile &t, int, int i,
                                                   tchi_ring_place *at)
    {
        bool diagonal = t.row == t.col;
        float inputs[1][64], gradients[1][64];
        int last = tchi_gemm_multiply<gram_gemm>(p, m, diagonal, inputs, p.ktiles_a, at);
        tchi_gemm_finish<gram_gemm>(m, inputs, last);
        last = tchi_gemm_multiply<gram_gemm>(p, m, diagonal, gradients, p.ktiles - p.ktiles_a, at);
        tchi_gemm_finish<gram_gemm>(m, gradients, last);
        double size;
        double total = dot_sums(inputs[0], p.one, gradients[0], &size);
        if (threadIdx.x % 32 == 0) {
            int64_t part = (int64_t)tchi_gemm_item<gram_gemm>(i) * WARPS + threadIdx.x / 32;
            p.parts[part] = diagonal ? total : 2.0 * total;
            if (p.sizes != nullptr) {
                p.sizes[part] = diagonal ? size : 2.0 * size;
            }
        }
    }
};

tch_status tchi_cuda_sample_norms_wgmma_gram(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                             bool bias, double *parts, double *sizes, int64_t *tiles)
{
    norms_problem p = {};
    p.tiles = (int32_t)tchi_lower_tiles(tchi_cuda_ceil_div(a->rows, TCHI_GRAM_TILE));
    p.items = (int32_t)(p.tiles * a->batch);
    p.ktiles_a = (int32_t)tchi_cuda_ceil_div(a->cols, TCHI_GRAM_DEPTH);
    p.ktiles = p.ktiles_a + (int32_t)tchi_cuda_ceil_div(g->cols, TCHI_GRAM_DEPTH);
    p.one = bias ? 1.0f : 0.0f;
    p.parts = parts;
    p.sizes = sizes;
    *tiles = (int64_t)p.tiles * WARPS;
    TCHI_TRY(tchi_cuda_tensor_map(a, TCHI_GRAM_TILE, &p.x));
    TCHI_TRY(tchi_cuda_tensor_map(g, TCHI_GRAM_TILE, &p.y));
    return launch_gemm<gram_gemm>(state, p);
}
