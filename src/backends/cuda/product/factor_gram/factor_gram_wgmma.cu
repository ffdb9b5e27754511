/* Factors of curvature for sm_90: the lower tiles of C = alpha A' A + beta C with the tiles of wgmma_tiles.cuh, each
 * element written to both of its places. A is of a half type; where it stands for matrices of float32, scaled by a
 * power of two, what it was multiplied by is taken out again. */
#include "backends/cuda/device/wgmma_tiles.cuh"
#include "backends/cuda/matrix/narrow.h"
#include "factor_gram.h"

typedef struct wgmma_factor_problem {
    tchi_wgmma_pair pair;
    float *c;
    int64_t ld, stride;
    int32_t n, rows; /* of C; tiles below each other */
    int32_t tiles;   /* of a matrix */
    float alpha, beta;
    const uint32_t *largest; /* of each matrix, or NULL */
} wgmma_factor_problem;

/* Tiles of the rows of tiles before `row`: two rows of tiles have as many, and the next two one more. */
static __host__ __device__ inline int tiles_before(int row)
{
    int pairs = row / 2;
    return pairs * (pairs + 1) + row % 2 * (pairs + 1);
}

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA

static __device__ __forceinline__ tchi_wgmma_work lower_tile(const wgmma_factor_problem &p, int item)
{
    int tile = item % p.tiles, row = (int)sqrtf(2.0f * (float)tile);
    row = min(row, p.rows - 1);
    while (tiles_before(row) > tile) {
        row--;
    }
    while (tiles_before(row + 1) <= tile) {
        row++;
    }
    return {row * TCHI_WGMMA_ROWS, (tile - tiles_before(row)) * TCHI_WGMMA_COLS, item / p.tiles};
}

/* Neighboring columns 2 t and 2 t + 1 of one row are a thread's; of a column eight threads have neighboring rows. */
static __device__ __forceinline__ void put(const wgmma_factor_problem &p, float *c, int i, int j, float value)
{
    if (i < p.n && j <= i) {
        value += p.beta == 0.0f ? 0.0f : p.beta * c[i * p.ld + j];
        c[i * p.ld + j] = value;
        c[j * p.ld + i] = value;
    }
}

#endif

/* n^2 k operations for exact halves. For n = 3072, k = 8192: 77 GFLOP, 0.1 ms at the 757 TFLOP/s of cuBLAS; 50 MB of A
 * and 76 MB of C, 0.03 ms. */
template <tch_scalar type>
static __global__ void __launch_bounds__(TCHI_WGMMA_THREADS, 1)
    factor_gram_wgmma(const __grid_constant__ wgmma_factor_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    extern __shared__ __align__(1024) char shared[];
    auto work_of = [&](int item) { return lower_tile(p, item); };
    tchi_wgmma_tiles<type>(shared, p.pair, work_of, [&](int, const tchi_wgmma_work &w, float(&sum)[128]) {
        float *c = p.c + w.matrix * p.stride;
        float back = p.largest == nullptr ? 1.0f : 1.0f / tchi_narrow_scale(p.largest[w.matrix]);
#pragma unroll
        for (int i = 0; i < 128; i++) {
            put(p, c, w.row + tchi_wgmma_row(i % 4), w.col + tchi_wgmma_col(i / 4, i % 4),
                p.alpha * (sum[i] * back * back));
        }
    });
#endif
}

extern "C" int tchi_cuda_factor_gram_wgmma_takes(const tchi_cuda_state *state, const tch_matrices *a,
                                                 const tch_matrices *c)
{
    return a->rows > 0 && c->rows < (1 << 20) && a->batch < 256 && tchi_wgmma_takes(state, a);
}

extern "C" tch_status tchi_cuda_factor_gram_wgmma(const tchi_cuda_state *state, double alpha, const tch_matrices *a,
                                                  const uint32_t *largest, double beta, const tch_matrices *c)
{
    wgmma_factor_problem p = {};
    p.c = (float *)c->data;
    p.ld = c->ld;
    p.stride = c->stride;
    p.n = (int32_t)c->rows;
    p.rows = (int32_t)tchi_cuda_ceil_div(c->rows, TCHI_WGMMA_ROWS);
    p.tiles = tiles_before(p.rows);
    p.alpha = (float)alpha;
    p.beta = (float)beta;
    p.largest = largest;
    TCHI_CUDA_PASS(tchi_wgmma_describe(a, a, p.tiles * c->batch, &p.pair));
    return tchi_wgmma_launch(
        state, a->type == TCH_SCALAR_BF16 ? factor_gram_wgmma<TCH_SCALAR_BF16> : factor_gram_wgmma<TCH_SCALAR_F16>, p,
        p.pair.items, "factor_gram_wgmma");
}
