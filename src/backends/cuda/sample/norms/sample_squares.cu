/* Sums over samples of the squares of gradients' elements, for EKFAC: a block keeps its tile of the sum in registers
 * and goes through the samples with the tiles of mma_tiles.cuh.
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
 *     }
 */
#include "backends/cuda/device/mma_tiles.cuh"
#include "sample_norms.h"

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

/* 2 T p d operations a sample; A and G move once, out is read and written once. For 32 samples of 768 to 3072 with T =
 * 256: 38.7 GFLOP, 0.1 ms at the 401 TFLOP/s of cuBLAS in TF32. */
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

template <tch_scalar type> static auto kernel_of(bool aligned)
{
    return aligned ? sample_squares_tiles<type, true> : sample_squares_tiles<type, false>;
}

tch_status tchi_cuda_sample_squares_mma(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                        double scale, double beta, const tch_matrices *out)
{
    bool aligned = tchi_tile_aligned(a) && tchi_tile_aligned(g);
    auto kernel = a->type == TCH_SCALAR_F32    ? kernel_of<TCH_SCALAR_F32>(aligned)
                  : a->type == TCH_SCALAR_BF16 ? kernel_of<TCH_SCALAR_BF16>(aligned)
                                               : kernel_of<TCH_SCALAR_F16>(aligned);
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
        return tchi_cuda_sample_squares_mma(s, a, g, scale, beta, out);
    }
    return tchi_cuda_sample_squares_plain(s, a, g, scale, beta, out);
}
