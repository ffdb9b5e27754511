/* The symmetric product C = c0 I + c1 D + c2 A B' for every combination of types and alignments, on CUDA cores in
 * float32, or float64 if A is, with the lower triangle mirrored. The fallback for every GPU; symmetric_product.c
 * prefers faster kernels.
 *
 *     for (i = 0; i < n; i++) {
 *         for (j = 0; j <= i; j++) {
 *             real sum = 0;
 *             for (l = 0; l < k; l++) {
 *                 sum += a[i][l] * b[j][l];
 *             }
 *             c[i][j] = c[j][i] = c0 * (i == j) + c1 * d[i][j] + c2 * sum;
 *         }
 *     } */
#include "backends/cuda/device/elements.cuh"

#define TILE 64
#define KTILE 16
#define SIDE 16 /* threads along each side of a block; each computes 4 by 4 elements, SIDE apart */
#define EACH (TILE / SIDE)

/* --- the product ------------------------------------------------------------------------------------------------- */

typedef struct problem {
    tchi_cuda_operand a, b, d, c; /* d.data may be NULL */
    int64_t n, k;
    int64_t tiles; /* of one matrix */
    int64_t blocks;
    double c0, c1, c2;
} problem;

/* Rows [first, first + TILE), columns [from, from + KTILE); beyond the matrix, zeros. */
template <typename real>
static __device__ void load_ktile(real (*ktile)[KTILE + 1], const tchi_cuda_operand &m, const problem &p,
                                  int64_t matrix, int64_t first, int64_t from)
{
    for (int e = (int)threadIdx.x; e < TILE * KTILE; e += SIDE * SIDE) {
        int64_t i = first + e / KTILE, j = from + e % KTILE;
        bool inside = i < p.n && j < p.k;
        ktile[e / KTILE][e % KTILE] =
            inside ? tchi_cuda_load<real>(m.type, tchi_cuda_at(m, matrix, i, j), 0, m.stride) : (real)0;
    }
}

template <typename real>
static __device__ void multiply_ktile(real (*sum)[EACH], const real (*a)[KTILE + 1], const real (*b)[KTILE + 1])
{
    int x = (int)threadIdx.x % SIDE, y = (int)threadIdx.x / SIDE;
#pragma unroll 4
    for (int k = 0; k < KTILE; k++) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                sum[i][j] += a[y + SIDE * i][k] * b[x + SIDE * j][k];
            }
        }
    }
}

/* An element of the lower triangle, and its mirror image. */
template <typename real>
static __device__ void store_element(const problem &p, int64_t matrix, int64_t i, int64_t j, real product)
{
    if (j > i || i >= p.n) {
        return;
    }
    real value = (real)p.c2 * product;
    if (p.d.data != NULL) {
        value += (real)p.c1 * tchi_cuda_load<real>(p.d.type, tchi_cuda_at(p.d, matrix, i, j), 0, p.d.stride);
    }
    value = i == j ? value + (real)p.c0 : value;
    tchi_cuda_store(p.c.type, tchi_cuda_at(p.c, matrix, i, j), 0, p.c.stride, value);
    tchi_cuda_store(p.c.type, tchi_cuda_at(p.c, matrix, j, i), 0, p.c.stride, value);
}

/* n^2 k operations per matrix; each tile reads 2 TILE k elements. */
template <typename real> static __global__ void __launch_bounds__(SIDE *SIDE, 2) symmetric_any_kernel(const problem p)
{
    __shared__ real a[TILE][KTILE + 1];
    __shared__ real b[TILE][KTILE + 1];
    for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
        int64_t matrix = block / p.tiles, tile = block % p.tiles, above = tchi_lower_row(tile);
        int64_t row = above * TILE, col = (tile - tchi_lower_tiles(above)) * TILE;
        real sum[EACH][EACH] = {};
        for (int64_t k = 0; k < p.k; k += KTILE) {
            __syncthreads(); /* the previous k-tile is no longer in use */
            load_ktile<real>(a, p.a, p, matrix, row, k);
            load_ktile<real>(b, p.b, p, matrix, col, k);
            __syncthreads();
            multiply_ktile<real>(sum, a, b);
        }
#pragma unroll
        for (int e = 0; e < EACH * EACH; e++) {
            int y = (int)threadIdx.x / SIDE + SIDE * (e / EACH), x = (int)threadIdx.x % SIDE + SIDE * (e % EACH);
            store_element<real>(p, matrix, row + y, col + x, sum[e / EACH][e % EACH]);
        }
    }
}

extern "C" tch_status tchi_cuda_symmetric_any(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d,
                                              double c2, const tch_matrices *a, const tch_matrices *b,
                                              const tch_matrices *c)
{
    problem p = {};
    p.a = tchi_cuda_operand_of(a);
    p.b = tchi_cuda_operand_of(b);
    p.c = tchi_cuda_operand_of(c);
    if (d != NULL) {
        p.d = tchi_cuda_operand_of(d);
    }
    p.n = c->rows;
    p.k = a->cols;
    p.tiles = tchi_lower_tiles(tchi_cuda_ceil_div(c->rows, TILE));
    p.blocks = p.tiles * c->batch;
    p.c0 = c0;
    p.c1 = c1;
    p.c2 = c2;
    const unsigned grid = tchi_cuda_grid(p.blocks);
    auto kernel = a->type == TCH_SCALAR_F64 ? symmetric_any_kernel<double> : symmetric_any_kernel<float>;
    return tchi_cuda_launch(state, "symmetric_any_kernel", kernel, grid, SIDE * SIDE, p);
}

/* --- the mirror image -------------------------------------------------------------------------------------------- */

#define SQUARE 32

typedef struct mirror_params {
    tchi_cuda_operand c;
    int64_t n, tiles, blocks;
} mirror_params;

/* Reads the lower half and writes the upper, transposing tiles in shared memory. */
static __global__ void __launch_bounds__(SQUARE * 8) mirror_lower_kernel(const mirror_params params)
{
    __shared__ double square[SQUARE][SQUARE + 1];
    const int x = (int)threadIdx.x % SQUARE;
    for (int64_t block = blockIdx.x; block < params.blocks; block += gridDim.x) {
        int64_t matrix = block / params.tiles, tile = block % params.tiles, above = tchi_lower_row(tile);
        int64_t row = above * SQUARE, col = (tile - tchi_lower_tiles(above)) * SQUARE;
        __syncthreads(); /* the previous square has been written */
        for (int y = (int)threadIdx.x / SQUARE; y < SQUARE; y += 8) {
            if (row + y < params.n && col + x < row + y) {
                square[y][x] = tchi_cuda_load<double>(params.c.type, tchi_cuda_at(params.c, matrix, row + y, col + x),
                                                      0, params.c.stride);
            }
        }
        __syncthreads();
        for (int y = (int)threadIdx.x / SQUARE; y < SQUARE; y += 8) {
            if (row + x < params.n && col + y < row + x) {
                tchi_cuda_store(params.c.type, tchi_cuda_at(params.c, matrix, col + y, row + x), 0, params.c.stride,
                                square[x][y]);
            }
        }
    }
}

extern "C" tch_status tchi_cuda_mirror_lower(tchi_cuda_state *state, const tch_matrices *c)
{
    mirror_params params = {tchi_cuda_operand_of(c), c->rows, tchi_lower_tiles(tchi_cuda_ceil_div(c->rows, SQUARE)), 0};
    params.blocks = params.tiles * c->batch;
    return tchi_cuda_launch(state, "mirror_lower_kernel", mirror_lower_kernel, tchi_cuda_grid(params.blocks),
                            SQUARE * 8, params);
}
