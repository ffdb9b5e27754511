/* Squared norms of per-sample gradients by tensor cores, in tile form, |G' A|^2 by tiles of the gradient, and in Gram
 * form, <A A', G G'> by the lower tiles of both, the first kept in registers while the second is computed. Tiles are
 * those of mma_tiles.cuh; measurements in bench/logs/cuda_sample_norms.md. */
#include "backends/cuda/device/mma_tiles.cuh"
#include "sample_norms.h"

/* Blocks per multiprocessor with one set of sums in registers: two if shared memory allows, except for float32 by
 * columns, which exceeds half of the registers. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define BLOCKS 2
#else
#define BLOCKS 1
#endif

typedef struct norms_problem {
    tchi_tile_pair first, second; /* G' A; or, in Gram form, A A' and G G' */
    int64_t across;               /* tiles in a row of G' A */
    int64_t tiles, items;         /* of one sample, of all */
    float one;                    /* added to A A': 1 with a bias, or 0 */
    double *parts, *sizes;
} norms_problem;

/* The inner product of two tiles, over one thread's part, or the sum of the absolute values of its terms. */
template <bool absolute = false>
static __device__ __forceinline__ double dot_tile_sums(const tchi_tile_sums &x, const tchi_tile_sums &y)
{
    float total[4] = {};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        float term = x.v[i / 16][i / 4 % 4][i % 4] * y.v[i / 16][i / 4 % 4][i % 4];
        total[i % 4] += absolute ? fabsf(term) : term;
    }
    return (double)((total[0] + total[1]) + (total[2] + total[3]));
}

/* Tile form. 2 T p d operations per sample. A block reads T 256 elements for its tile; from memory (p + d) T
 * move. For 8 samples of 768 to 3072 with T = 1024 in float32: 38.7 GFLOP, 0.097 ms at the 401 TFLOP/s of cuBLAS in
 * TF32; 126 MB, 0.03 ms at 4.19 TB/s. */
template <tch_scalar type, bool aligned>
static __global__ void __launch_bounds__(TCHI_TILE_THREADS, aligned ? BLOCKS : 1)
    sample_norms_tiles(const __grid_constant__ norms_problem p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) char shared[];
    __shared__ double sums[32];
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        int64_t tile = item % p.tiles;
        tchi_tile_work w = {tile / p.across * TCHI_TILE_ROWS, tile % p.across * TCHI_TILE_COLS, item / p.tiles, 0, 1};
        double total = 0.0;
        tchi_tiles<type, false, aligned>(shared, p.first, w,
                                         [&](tchi_tile_sums &sum) { total = dot_tile_sums(sum, sum); });
        total = tchi_cuda_block_sum(total, (int)threadIdx.x, TCHI_TILE_THREADS, sums);
        if (threadIdx.x == 0) {
            p.parts[item] = total;
        }
    }
#endif
}

/* Gram form. T^2 (p + d) operations per sample, and half of a diagonal tile is wasted. A block reads 256 (p + d)
 * elements for its tile. For 32 samples of 768 to 3072 with T = 256 in float32: 8 GFLOP, 0.02 ms at the 401 TFLOP/s of
 * cuBLAS in TF32; 126 MB, 0.03 ms at 4.19 TB/s. */
template <tch_scalar type, bool aligned>
static __global__ void __launch_bounds__(TCHI_TILE_THREADS, 1)
    sample_norms_gram(const __grid_constant__ norms_problem p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) char shared[];
    __shared__ double sums[32];
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        int64_t tile = item % p.tiles;
        int64_t above = tchi_lower_row(tile);
        int64_t left = tile - tchi_lower_tiles(above);
        tchi_tile_work w = {above * TCHI_TILE_ROWS, left * TCHI_TILE_ROWS, item / p.tiles, 0, 1};
        tchi_tile_sums kept;
        double total = 0.0;
        double size = 0.0;
        tchi_tiles<type, true, aligned>(shared, p.first, w, [&](tchi_tile_sums &sum) {
#pragma unroll
            for (int i = 0; i < 64; i++) {
                kept.v[i / 16][i / 4 % 4][i % 4] = sum.v[i / 16][i / 4 % 4][i % 4] + p.one;
            }
        });
        tchi_tiles<type, true, aligned>(shared, p.second, w, [&](tchi_tile_sums &sum) {
            total = dot_tile_sums(kept, sum);
            size = dot_tile_sums<true>(kept, sum);
        });
        total = tchi_cuda_block_sum(total, (int)threadIdx.x, TCHI_TILE_THREADS, sums);
        size = tchi_cuda_block_sum(size, (int)threadIdx.x, TCHI_TILE_THREADS, sums);
        if (threadIdx.x == 0) {
            p.parts[item] = above != left ? 2.0 * total : total;
            if (p.sizes != nullptr) {
                p.sizes[item] = above != left ? 2.0 * size : size;
            }
        }
    }
#endif
}

/* --- host -------------------------------------------------------------------------------------------------------- */

template <tch_scalar type> static auto kernel_of(tchi_norms_form form, bool aligned)
{
    return form == TCHI_NORMS_GRAM ? (aligned ? sample_norms_gram<type, true> : sample_norms_gram<type, false>)
                                   : (aligned ? sample_norms_tiles<type, true> : sample_norms_tiles<type, false>);
}

static norms_problem mma_problem_of(const tch_matrices *a, const tch_matrices *g, tchi_norms_form form)
{
    norms_problem p = {};
    bool gram = form == TCHI_NORMS_GRAM;
    tchi_tile_side inputs = tchi_tile_side_of(a, gram);
    tchi_tile_side gradients = tchi_tile_side_of(g, gram);
    if (gram) {
        p.first = {inputs, inputs, a->cols};
        p.second = {gradients, gradients, g->cols};
        p.tiles = tchi_lower_tiles(tchi_cuda_ceil_div(a->rows, TCHI_TILE_ROWS));
    } else {
        p.first = {gradients, inputs, a->rows};
        p.across = tchi_cuda_ceil_div(a->cols, TCHI_TILE_COLS);
        p.tiles = p.across * tchi_cuda_ceil_div(g->cols, TCHI_TILE_ROWS);
    }
    p.items = p.tiles * a->batch;
    return p;
}

tch_status tchi_cuda_sample_norms_mma(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                      tchi_norms_form form, bool bias, double *parts, double *sizes, int64_t *tiles)
{
    bool aligned = tchi_tile_aligned(a) && tchi_tile_aligned(g);
    auto kernel = a->type == TCH_SCALAR_F32    ? kernel_of<TCH_SCALAR_F32>(form, aligned)
                  : a->type == TCH_SCALAR_BF16 ? kernel_of<TCH_SCALAR_BF16>(form, aligned)
                                               : kernel_of<TCH_SCALAR_F16>(form, aligned);
    norms_problem p = mma_problem_of(a, g, form);
    p.one = bias ? 1.0f : 0.0f;
    p.parts = parts;
    p.sizes = sizes;
    *tiles = p.tiles;
    return tchi_cuda_launch_shared(state, form == TCHI_NORMS_GRAM ? "sample_norms_gram" : "sample_norms_tiles", kernel,
                                   tchi_cuda_grid(p.items), TCHI_TILE_THREADS, TCHI_TILE_SHARED_BYTES,
                                   TCHI_TILE_SHARED_BYTES, p);
}

/* --- squares of elements ------------------------------------------------------------------------------------------ */

/* Sums over samples of the squared elements of gradients, for EKFAC: a block keeps its tile of the sum in registers and
 * iterates over the samples.
 *
 *     for (i = 0; i < p; i++) {
 *         for (j = 0; j < d; j++) {
 *             float squares = 0;
 *             for (b = 0; b < samples; b++) {
 *                 float sum = sum over s of g[b][s][i] * a[b][s][j];
 *                 squares += sum * sum;
 *             }
 *             out[i][j] = beta * out[i][j] + scale * squares;
 *         }
 *     } */
typedef struct squares_problem {
    tchi_tile_pair pair;
    tchi_cuda_operand out;
    int64_t samples, groups;
    int64_t across, tiles, items;
    float scale, beta;
} squares_problem;

static __device__ __forceinline__ void store_square(const squares_problem &p, int64_t group, int64_t i, int64_t j,
                                                    float value)
{
    if (i < p.pair.x.count && j < p.pair.y.count) {
        char *to = tchi_cuda_at(p.out, group, i, j);
        float before = p.beta == 0.0f ? 0.0f : p.beta * tchi_cuda_load<float>(p.out.type, to, 0, 0);
        tchi_cuda_store<float>(p.out.type, to, 0, 0, before + p.scale * value);
    }
}

/* 2 T p d operations per sample; A and G are read once, out is read and written once. For 32 samples of 768 to 3072
 * with T = 256: 38.7 GFLOP, 0.1 ms at the 401 TFLOP/s of cuBLAS in TF32. */
template <tch_scalar type, bool aligned>
static __global__ void __launch_bounds__(TCHI_TILE_THREADS, 1)
    sample_squares_tiles(const __grid_constant__ squares_problem p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr int size = type == TCH_SCALAR_F32 ? 4 : 2;
    extern __shared__ __align__(1024) char shared[];
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        int64_t group = item / p.tiles, tile = item % p.tiles;
        tchi_tile_work w = {tile / p.across * TCHI_TILE_ROWS, tile % p.across * TCHI_TILE_ROWS, group, p.groups,
                            p.samples};
        tchi_tile_sums squares = {};
        tchi_tiles<type, false, aligned>(shared, p.pair, w, [&](tchi_tile_sums &sum) {
#pragma unroll
            for (int i = 0; i < 64; i++) {
                float value = sum.v[i / 16][i / 4 % 4][i % 4];
                squares.v[i / 16][i / 4 % 4][i % 4] += value * value;
            }
        });
#pragma unroll
        for (int i = 0; i < 64; i++) {
            int e = i % 4;
            store_square(p, group, w.row + tchi_tile_row<size, false>(i / 16, e / 2),
                         w.col + tchi_tile_col<size, false>(i / 4 % 4, e % 2), squares.v[i / 16][i / 4 % 4][e]);
        }
    }
#endif
}

template <tch_scalar type> static auto squares_kernel(bool aligned)
{
    return aligned ? sample_squares_tiles<type, true> : sample_squares_tiles<type, false>;
}

static tch_status squares_by_mma(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                 double scale, double beta, const tch_matrices *out)
{
    bool aligned = tchi_tile_aligned(a) && tchi_tile_aligned(g);
    auto kernel = a->type == TCH_SCALAR_F32    ? squares_kernel<TCH_SCALAR_F32>(aligned)
                  : a->type == TCH_SCALAR_BF16 ? squares_kernel<TCH_SCALAR_BF16>(aligned)
                                               : squares_kernel<TCH_SCALAR_F16>(aligned);
    squares_problem p = {};
    p.pair = {tchi_tile_side_of(g, false), tchi_tile_side_of(a, false), a->rows};
    p.out = tchi_cuda_operand_of(out);
    p.groups = out->batch;
    p.samples = a->batch / out->batch;
    p.across = tchi_cuda_ceil_div(a->cols, TCHI_TILE_ROWS);
    p.tiles = p.across * tchi_cuda_ceil_div(g->cols, TCHI_TILE_ROWS);
    p.items = p.tiles * p.groups;
    p.scale = (float)scale;
    p.beta = (float)beta;
    return tchi_cuda_launch_shared(state, "sample_squares_tiles", kernel, tchi_cuda_grid(p.items), TCHI_TILE_THREADS,
                                   TCHI_TILE_SHARED_BYTES, TCHI_TILE_SHARED_BYTES, p);
}

extern "C" tch_status tchi_cuda_sample_squares(void *state, const tch_matrices *a, const tch_matrices *g, double scale,
                                               double beta, int32_t rounded, const tch_matrices *out, void *)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    if (out->batch == 0 || out->rows == 0 || out->cols == 0) {
        return TCH_OK;
    }
    bool half = a->type == TCH_SCALAR_F16 || a->type == TCH_SCALAR_BF16;
    if (s->device.major >= 8 && a->batch > 0 && a->rows > 0 && (half || (a->type == TCH_SCALAR_F32 && rounded))) {
        return squares_by_mma(s, a, g, scale, beta, out);
    }
    return tchi_cuda_sample_squares_plain(s, a, g, scale, beta, out);
}
