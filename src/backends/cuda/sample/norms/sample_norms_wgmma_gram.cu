/* Squared norms of per-sample gradients in float32 for sm_90, in Gram form: <A A', G G'> by the lower tiles of both,
 * whose rows wgmma takes from shared memory. The tensor cores cut operands off after 11 bits, which would make every
 * norm smaller by about a thousandth; so the threads that multiply round a k-tile where it lies, while the k-tile
 * before it is being multiplied.
 *
 * The one thing to know before changing it: k-tiles go round through STAGES places in shared memory as in
 * wgmma_tiles.cuh, those of A first and then, without a pause, those of G; a k-tile is multiplied only after all
 * threads have rounded and published their parts of it. A tile on the diagonal has one operand, loaded once. */
#include "sample_norms.h"

#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/hopper.cuh"
#include "sample_gram.cuh"

#define TILE TCHI_GRAM_TILE
#define DEPTH TCHI_GRAM_DEPTH
#define KTILE_BYTES TCHI_GRAM_KTILE_BYTES
#define STAGES 6
#define GROUPS 2
#define WARPS (4 * GROUPS)
#define THREADS (128 * GROUPS + 32) /* one thread of the last warp asks for copies */

typedef struct gram_problem {
    int32_t tiles, items;
    int32_t ktiles_a, ktiles; /* of A, and of A and G */
    float one;                /* more in A A' where there is a bias, or 0 */
    double *parts, *sizes;
    CUtensorMap a, g;
} gram_problem;

typedef struct gram_memory {
    char stage[STAGES][2][KTILE_BYTES];
    uint64_t full[STAGES], empty[STAGES];
} gram_memory;

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA /* what follows has instructions of sm_90a */

typedef struct gram_tile {
    int matrix, row, col;
} gram_tile;

static __device__ __forceinline__ gram_tile tile_of(const gram_problem &p, int item)
{
    int tile = item % p.tiles;
    int above = (int)tchi_lower_row(tile);
    return {item / p.tiles, above * TILE, (tile - (int)tchi_lower_tiles(above)) * TILE};
}

/* The k-tiles of all tiles of the block, by one thread. To the accelerator a number is two of 16 bits. */
static __device__ inline void load_all(const gram_problem &p, gram_memory &m)
{
    tchi_gram_place at = {0, 0};
    for (int item = (int)blockIdx.x; item < p.items; item += (int)gridDim.x) {
        gram_tile t = tile_of(p, item);
        int operands = t.row == t.col ? 1 : 2;
        for (int ktile = 0; ktile < p.ktiles; ktile++) {
            const CUtensorMap *map = ktile < p.ktiles_a ? &p.a : &p.g;
            int x = (ktile < p.ktiles_a ? ktile : ktile - p.ktiles_a) * 2 * DEPTH;
            tchi_barrier_wait(m.empty + at.stage, at.parity ^ 1);
            tchi_barrier_arrive_expecting(m.full + at.stage, operands * KTILE_BYTES);
            tchi_tma_load(m.stage[at.stage][0], map, x, t.row, t.matrix, m.full + at.stage);
            if (operands == 2) {
                tchi_tma_load(m.stage[at.stage][1], map, x, t.col, t.matrix, m.full + at.stage);
            }
            tchi_gram_step<STAGES>(&at);
        }
    }
}

static __device__ __forceinline__ void leave(uint64_t *empty)
{
    if (threadIdx.x % 32 == 0) {
        tchi_barrier_arrive(empty);
    }
}

/* To TF32, to nearest: the whole of a stage, or its first half. */
static __device__ __forceinline__ void round_ktile(char *stage, int bytes)
{
#pragma unroll 4
    for (int at = (int)threadIdx.x * 16; at < bytes; at += 128 * GROUPS * 16) {
        uint4 four = *(const uint4 *)(stage + at);
        *(uint4 *)(stage + at) = make_uint4(tchi_round_tf32(four.x), tchi_round_tf32(four.y), tchi_round_tf32(four.z),
                                            tchi_round_tf32(four.w));
    }
    tchi_wgmma_publish();
    tchi_threads_sync(1, 128 * GROUPS);
}

/* `ktiles` k-tiles of one of the two Gram matrices. Addresses in descriptors count 16 bytes, and a step of 8 numbers is
 * 32. */
static __device__ __forceinline__ void multiply(gram_memory &m, float (&sum)[64], int ktiles, bool diagonal,
                                                tchi_gram_place *at)
{
    int before = 0;
    for (int ktile = 0; ktile < ktiles; ktile++) {
        tchi_barrier_wait(m.full + at->stage, at->parity);
        round_ktile(m.stage[at->stage][0], (diagonal ? 1 : 2) * KTILE_BYTES);
        uint64_t x = tchi_wgmma_rows(m.stage[at->stage][0] + tchi_warpgroup() * (KTILE_BYTES / 2));
        uint64_t y = tchi_wgmma_rows(m.stage[at->stage][diagonal ? 0 : 1]);
        tchi_wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 8; k++) {
            tchi_wgmma_tf32_n128(sum, x + 2 * k, y + 2 * k, k > 0 || ktile > 0);
        }
        tchi_wgmma_commit();
        tchi_wgmma_wait<1>();
        if (ktile > 0) {
            leave(m.empty + before);
        }
        before = at->stage;
        tchi_gram_step<STAGES>(at);
    }
    tchi_wgmma_wait<0>();
    tchi_wgmma_results(sum);
    leave(m.empty + before);
}

/* A warp's inner product of x, with `one` more, and y, and the sum of the absolute values of its terms, in one pass
 * over registers that are all taken. */
static __device__ __forceinline__ double dot(const float (&x)[64], float one, const float (&y)[64], double *size)
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

static __device__ __forceinline__ void create_barriers(gram_memory &m)
{
    for (int i = 0; i < STAGES; i++) {
        tchi_barrier_create(m.full + i, 1);
        tchi_barrier_create(m.empty + i, WARPS);
    }
    tchi_barrier_publish();
}

#endif

/* The two numbers are those of sample_norms_gram in sample_norms_mma.cu. */
static __global__ void __launch_bounds__(THREADS, 1) sample_norms_wgmma_gram(const __grid_constant__ gram_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    extern __shared__ __align__(1024) char shared[];
    gram_memory &m = *(gram_memory *)shared;
    if (threadIdx.x == 0) {
        create_barriers(m);
    }
    __syncthreads();
    if (threadIdx.x >= 128 * GROUPS) {
        if (threadIdx.x == 128 * GROUPS) {
            load_all(p, m);
        }
        return;
    }
    tchi_gram_place at = {0, 0};
    for (int item = (int)blockIdx.x; item < p.items; item += (int)gridDim.x) {
        gram_tile t = tile_of(p, item);
        bool diagonal = t.row == t.col;
        float inputs[64];
        float gradients[64];
        multiply(m, inputs, p.ktiles_a, diagonal, &at);
        multiply(m, gradients, p.ktiles - p.ktiles_a, diagonal, &at);
        double size;
        double total = dot(inputs, p.one, gradients, &size);
        if (threadIdx.x % 32 == 0) {
            p.parts[(int64_t)item * WARPS + threadIdx.x / 32] = diagonal ? total : 2.0 * total;
            if (p.sizes != nullptr) {
                p.sizes[(int64_t)item * WARPS + threadIdx.x / 32] = diagonal ? size : 2.0 * size;
            }
        }
    }
#endif
}

/* --- host -------------------------------------------------------------------------------------------------------- */

bool tchi_cuda_sample_norms_wgmma_gram_takes(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g)
{
    return tchi_gram_takes(state, a, g);
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
    TCHI_CUDA_PASS(tchi_gram_describe(a, &p.a));
    TCHI_CUDA_PASS(tchi_gram_describe(g, &p.g));
    TCHI_CUDA_TRY(cudaFuncSetAttribute((const void *)sample_norms_wgmma_gram,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(gram_memory)),
                  "sample_norms_wgmma_gram");
    int blocks = p.items < state->device.processors ? p.items : state->device.processors;
    sample_norms_wgmma_gram<<<(unsigned)blocks, THREADS, sizeof(gram_memory), state->stream>>>(p);
    return tchi_cuda_launched(state, "sample_norms_wgmma_gram");
}
