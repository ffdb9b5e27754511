/* Factors of curvature by tensor cores: the lower tiles of C = alpha A A' + beta C, or alpha A' A + beta C, each
 * element summed once and written to both of its places, so that C is symmetric to the last bit. The tiles are those of
 * mma_tiles.cuh; the ladder of measurements is bench/ladder/cuda_factor_gram.md.
 *
 *     for (i = 0; i < n; i++) {
 *         for (j = 0; j <= i; j++) {
 *             float sum = 0;
 *             for (k = 0; k < depth; k++) {
 *                 sum += a[i][k] * a[j][k];                   // or a[k][i] * a[k][j]
 *             }
 *             c[i][j] = c[j][i] = alpha * sum + beta * c[i][j];
 *         }
 *     }
 */
#include "backends/cuda/device/mma_tiles.cuh"
#include "backends/cuda/sample/norms/sample_norms.h"
#include "factor_gram.h"

/* As in sample_norms_mma.cu. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define BLOCKS 2
#else
#define BLOCKS 1
#endif

typedef struct factor_problem {
    tchi_tile_pair pair;
    float *c;
    int64_t n, ld, stride;
    int64_t tiles, items;
    float alpha, beta;
    int32_t wide; /* rows of C are aligned to 16 bytes */
} factor_problem;

/* One element, and its mirror image. */
static __device__ __forceinline__ void put(const factor_problem &p, float *c, int64_t i, int64_t j, float sum)
{
    if (i < p.n && j <= i) {
        float value = p.alpha * sum;
        value += p.beta == 0.0f ? 0.0f : p.beta * c[i * p.ld + j];
        c[i * p.ld + j] = value;
        c[j * p.ld + i] = value;
    }
}

/* Of float32 given by columns a thread has 4 by 4 squares, which it writes as rows and as columns. The tile lies below
 * the diagonal and inside of C. */
static __device__ __forceinline__ void put_squares(const factor_problem &p, float *c, const tchi_tile_work &w,
                                                   tchi_tile_sums<4> &sum)
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int64_t row = w.row + tchi_tile_row<4, false>(0, e / 2), col = w.col + tchi_tile_col<4, false, 4>(0, e % 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 *to = (float4 *)(c + (row + i) * p.ld + col);
            float4 before = p.beta == 0.0f ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *to;
            sum.v[i][0][e] = p.alpha * sum.v[i][0][e] + p.beta * before.x;
            sum.v[i][1][e] = p.alpha * sum.v[i][1][e] + p.beta * before.y;
            sum.v[i][2][e] = p.alpha * sum.v[i][2][e] + p.beta * before.z;
            sum.v[i][3][e] = p.alpha * sum.v[i][3][e] + p.beta * before.w;
            *to = make_float4(sum.v[i][0][e], sum.v[i][1][e], sum.v[i][2][e], sum.v[i][3][e]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            *(float4 *)(c + (col + j) * p.ld + row) =
                make_float4(sum.v[0][j][e], sum.v[1][j][e], sum.v[2][j][e], sum.v[3][j][e]);
        }
    }
}

/* n^2 k operations for exact halves; n k elements and n^2 numbers of C move. For n = 3072, k = 8192 in float32: 77
 * GFLOP, 0.19 ms at the 401 TFLOP/s of cuBLAS in TF32; 100 MB and 76 MB, 0.04 ms. */
template <tch_scalar type, bool by_rows, bool aligned>
static __global__ void __launch_bounds__(TCHI_TILE_THREADS, aligned && (by_rows || type != TCH_SCALAR_F32) ? BLOCKS : 1)
    factor_gram_tiles(const __grid_constant__ factor_problem p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr int size = type == TCH_SCALAR_F32 ? 4 : 2;
    extern __shared__ __align__(1024) char shared[];
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        int64_t tile = item % p.tiles;
        int64_t above = tchi_lower_row(tile);
        int64_t left = tile - tchi_lower_tiles(above);
        tchi_tile_work w = {above * TCHI_TILE_ROWS, left * TCHI_TILE_ROWS, item / p.tiles, 0, 1};
        float *c = p.c + item / p.tiles * p.stride;
        bool inner = size == 4 && !by_rows && p.wide && above != left && w.row + TCHI_TILE_ROWS <= p.n;
        tchi_tiles<type, by_rows, aligned, 4>(shared, p.pair, w, [&](tchi_tile_sums<4> &sum) {
            if (inner) {
                put_squares(p, c, w, sum);
                return;
            }
#pragma unroll
            for (int i = 0; i < 64; i++) {
                int e = i % 4;
                put(p, c, w.row + tchi_tile_row<size, by_rows>(i / 16, e / 2),
                    w.col + tchi_tile_col<size, by_rows, 4>(i / 4 % 4, e % 2), sum.v[i / 16][i / 4 % 4][e]);
            }
        });
    }
#endif
}

/* --- host -------------------------------------------------------------------------------------------------------- */

typedef void (*factor_kernel)(factor_problem);

template <tch_scalar type> static factor_kernel kernel_of(bool by_rows, bool aligned)
{
    if (by_rows) {
        return aligned ? factor_gram_tiles<type, true, true> : factor_gram_tiles<type, true, false>;
    }
    return aligned ? factor_gram_tiles<type, false, true> : factor_gram_tiles<type, false, false>;
}

extern "C" tch_status tchi_cuda_factor_gram_mma(const tchi_cuda_state *state, double alpha, const tch_matrices *a,
                                                int32_t transpose, double beta, const tch_matrices *c)
{
    bool aligned = tchi_tile_aligned(a);
    factor_kernel kernel = a->type == TCH_SCALAR_F32    ? kernel_of<TCH_SCALAR_F32>(!transpose, aligned)
                           : a->type == TCH_SCALAR_BF16 ? kernel_of<TCH_SCALAR_BF16>(!transpose, aligned)
                                                        : kernel_of<TCH_SCALAR_F16>(!transpose, aligned);
    factor_problem p = {};
    tchi_tile_side side = tchi_tile_side_of(a, !transpose);
    p.pair = {side, side, transpose ? a->rows : a->cols};
    p.c = (float *)c->data;
    p.n = c->rows;
    p.ld = c->ld;
    p.stride = c->stride;
    p.tiles = tchi_lower_tiles(tchi_cuda_ceil_div(c->rows, TCHI_TILE_ROWS));
    p.items = p.tiles * c->batch;
    p.alpha = (float)alpha;
    p.beta = (float)beta;
    p.wide = tchi_cuda_operand_of(c).wide;
    TCHI_CUDA_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       tchi_tile_shape<4>::shared_bytes),
                  "factor_gram_tiles");
    kernel<<<tchi_cuda_grid(p.items), TCHI_TILE_THREADS, tchi_tile_shape<4>::shared_bytes, state->stream>>>(p);
    return tchi_cuda_launched(state, "factor_gram_tiles");
}
