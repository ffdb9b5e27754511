/* Shared by symmetric_pingpong.cu and its epilogues: the problem, and the tiles of a CTA. */
#ifndef TCHI_CUDA_SYMMETRIC_PINGPONG_CUH
#define TCHI_CUDA_SYMMETRIC_PINGPONG_CUH

#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/persistent_gemm.cuh"
#include "backends/cuda/product/factor_gram/factor_gram.h"
#include "symmetric_squares.cuh"

#define TILE TCHI_GEMM_BOX /* rows and columns of C that a warpgroup computes at a time */
#define STAGES 6           /* of one plane; half as many of two */
#define CLUSTER 2
/* Matrices per group, diagonal tiles last: a matrix is still in L2 for its last tiles, and these singles seldom leave a
 * CTA of a cluster idle. */
#define GROUP 4

typedef struct pingpong_problem {
    int32_t n, batch;
    int32_t side;           /* tiles along one side of C */
    int32_t pairs, singles; /* of one matrix */
    int32_t items;          /* one is a tile for each CTA of a cluster */
    int32_t ktiles;         /* of A and of B for a tile */
    float c0, c1, c2;
    const double *scale; /* one per matrix, to the power of `exponent`; NULL for 1 */
    int32_t exponent;    /* 0, 1 or 2 */
    CUtensorMap a, b, c; /* planes of split matrices, contiguous */
    CUtensorMap d;
    tchi_cuda_operand split_d; /* instead of d, for split products */
    tchi_cuda_operand wide_c;  /* instead of c, for float64 and factors */
    tchi_factor_weights factor;
    const uint32_t *largest; /* of each matrix that A was copied from */
} pingpong_problem;

/* Planes of a matrix: a split one has its high parts and its low parts. */
static __host__ __device__ constexpr int planes_of(tch_scalar type)
{
    return type == TCH_SCALAR_BF16X2 ? 2 : 1;
}

/* Items of `matrices`: pairs of tiles for the two CTAs of a cluster, then pairs of singles. */
static __host__ __device__ inline int group_items(const pingpong_problem &p, int matrices)
{
    return matrices * p.pairs + (matrices * p.singles + CLUSTER - 1) / CLUSTER;
}

/* --- tiles ------------------------------------------------------------------------------------------------------- */

typedef struct pingpong_tile {
    int matrix, row, col;
    bool shares_b; /* with the other CTA */
    bool nothing;  /* no tile left for this CTA: it runs without storing */
} pingpong_tile;

/* Tiles of a column of C are paired from below; every second column leaves a single on the diagonal. */
static __device__ inline pingpong_tile pair_tile(const pingpong_problem &p, int matrix, int pair, int rank)
{
    int col = 0;
    while (pair >= (p.side - col) / 2) {
        pair -= (p.side - col) / 2;
        col++;
    }
    int row = col + (p.side - col) % 2 + 2 * pair + rank;
    return {matrix, row * TILE, col * TILE, true, false};
}

static __device__ inline pingpong_tile single_tile(const pingpong_problem &p, int matrix, int single)
{
    int col = 2 * single + 1 - p.side % 2;
    return {matrix, col * TILE, col * TILE, false, false};
}

/* This CTA's tile of an item: all pairs of a group of matrices, then their singles. */
static __device__ inline pingpong_tile pingpong_tile_of(const pingpong_problem &p, int item, int rank)
{
    int first = item / group_items(p, GROUP) * GROUP;
    int left = item % group_items(p, GROUP);
    int matrices = min(p.batch - first, GROUP);
    if (left < matrices * p.pairs) {
        return pair_tile(p, first + left / p.pairs, left % p.pairs, rank);
    }
    int single = (left - matrices * p.pairs) * CLUSTER + rank;
    if (single < matrices * p.singles) {
        return single_tile(p, first + single / p.singles, single % p.singles);
    }
    pingpong_tile none = single_tile(p, first, 0);
    none.nothing = true;
    return none;
}

/* The sums of rows 0 to 63 of a tile and of rows 64 to 127. */
typedef float pingpong_sums[2][64];

#endif
