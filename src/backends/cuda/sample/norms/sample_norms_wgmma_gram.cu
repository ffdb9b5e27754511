/* Squared norms of per-sample gradients in float32 for sm_90, in Gram form: <A A', G G'> by the lower tiles of both,
 * whose rows wgmma takes from shared memory. The tensor cores cut operands off after 11 bits, which would make every
 * norm smaller by about a thousandth; so the threads that multiply round a k-tile where it lies, while the k-tile
 * before it is being multiplied.
 *
 * A persistent GEMM (persistent_gemm.cuh): the k-tiles of A come first and then, without a pause, those of G. A k-tile
 * is multiplied only after all threads have rounded and published their parts of it. A tile on the diagonal has one
 * operand, loaded once. */
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/persistent_gemm.cuh"
#include "backends/cuda/device/triangle.cuh"
#include "sample_norms.h"

#define TILE TCHI_GRAM_TILE
#define DEPTH TCHI_GRAM_DEPTH
#define KTILE_BYTES TCHI_GRAM_KTILE_BYTES
#define WARPS (TCHI_GEMM_CONSUMERS / 32)
#define STAGES 6

typedef struct gram_problem {
    int32_t tiles, items;
    int32_t ktiles_a, ktiles; /* of A, and of A and G */
    float one;                /* more in A A' where there is a bias, or 0 */
    double *parts, *sizes;
    CUtensorMap a, g;
} gram_problem;

typedef struct gram_tile {
    int matrix, row, col;
} gram_tile;

/* To TF32, to nearest: the whole of a stage, or its first half. */
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

/* A warp's inner product of x, with `one` more, and y, and the sum of the absolute values of its terms, in one pass
 * over registers that are all taken. */
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
    *size = tchi_cuda_warp_sum((double)((sizes[0] + sizes[1]) + (sizes[2] + sizes[3])));
    return tchi_cuda_warp_sum((double)((total[0] + total[1]) + (total[2] + total[3])));
}

struct gram_gemm : tchi_gemm<STAGES, 1, false, false> {
    using problem = gram_problem;
    struct memory {
        char stage[STAGES][2][KTILE_BYTES];
        tchi_ring<STAGES> ring;
    };

    static __device__ __forceinline__ gram_tile tile_of(const gram_problem &p, int item, int)
    {
        int tile = item % p.tiles;
        int above = (int)tchi_lower_row(tile);
        return {item / p.tiles, above * TILE, (tile - (int)tchi_lower_tiles(above)) * TILE};
    }

    static __device__ __forceinline__ void load(const gram_problem &p, memory &m, int stage, const gram_tile &t, int,
                                                int ktile)
    {
        uint64_t *full = m.ring.full + stage;
        const CUtensorMap *map = ktile < p.ktiles_a ? &p.a : &p.g;
        int operands = t.row == t.col ? 1 : 2;
        int x = (ktile < p.ktiles_a ? ktile : ktile - p.ktiles_a) * DEPTH;
        tchi_barrier_arrive_expecting(full, operands * KTILE_BYTES);
        tchi_tma_load(m.stage[stage][0], map, x, t.row, t.matrix, full);
        if (operands == 2) {
            tchi_tma_load(m.stage[stage][1], map, x, t.col, t.matrix, full);
        }
    }

    /* Addresses in descriptors count 16 bytes, and a step of 8 numbers is 32. */
    static __device__ __forceinline__ void start(const gram_problem &, memory &m, int stage, bool diagonal,
                                                 float (&sum)[1][64], tchi_no_fragment &, int add)
    {
        round_ktile(m.stage[stage][0], (diagonal ? 1 : 2) * KTILE_BYTES);
        uint64_t x = tchi_wgmma_rows(m.stage[stage][0] + tchi_warpgroup() * (KTILE_BYTES / 2));
        uint64_t y = tchi_wgmma_rows(m.stage[stage][diagonal ? 0 : 1]);
        tchi_wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 8; k++) {
            tchi_wgmma<TCH_SCALAR_F32>(sum[0], x + 2 * k, y + 2 * k, k > 0 ? 1 : add);
        }
    }

    static __device__ __forceinline__ void compute(const gram_problem &p, memory &m, const gram_tile &t, int, int i,
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

/* The two numbers are those of sample_norms_gram in sample_norms_mma.cu. */
static __global__ void __launch_bounds__(gram_gemm::threads, 1)
    sample_norms_wgmma_gram(const __grid_constant__ gram_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    tchi_gemm_run<gram_gemm>(p);
#endif
}

tch_status tchi_cuda_sample_norms_wgmma_gram(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                             bool bias, double *parts, double *sizes, int64_t *tiles)
{
    gram_problem p = {};
    p.tiles = (int32_t)tchi_lower_tiles(tchi_cuda_ceil_div(a->rows, TILE));
    p.items = (int32_t)(p.tiles * a->batch);
    p.ktiles_a = (int32_t)tchi_cuda_ceil_div(a->cols, DEPTH);
    p.ktiles = p.ktiles_a + (int32_t)tchi_cuda_ceil_div(g->cols, DEPTH);
    p.one = bias ? 1.0f : 0.0f;
    p.parts = parts;
    p.sizes = sizes;
    *tiles = (int64_t)p.tiles * WARPS;
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(a, TILE, &p.a));
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(g, TILE, &p.g));
    return tchi_gemm_launch<gram_gemm>(state, "sample_norms_wgmma_gram", sample_norms_wgmma_gram, p);
}
