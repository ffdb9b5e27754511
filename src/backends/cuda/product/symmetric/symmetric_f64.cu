/* The symmetric product in float64 on tensor cores: C = c0 I + c1 D + c2 A B' over the lower tiles of C, mirrored. This
 * file assigns tiles to blocks; symmetric_f64_tile.cuh computes them.
 *
 * A batch of N matrices needs N n^2 k operations (half of 2 N n^2 k), and at least 8 N (2 n k + n^2) bytes, with 4 N
 * n^2 more for D. From L2 a tile of R by C reads 8 k (R + C) bytes for its 2 R C k operations: 8 operations per byte
 * for 64 by 64. Reasons and measurements: bench/logs/cuda_symmetric_f64.md. */
#include "backends/cuda/device/elements.cuh"
#include "symmetric_f64_tile.cuh"

/* float64 tensor cores at full rate: compute capability 8.0, 9.0 and 10.0. Elsewhere the kernel is empty. */
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
#define HAS_F64_TENSOR_CORES 1
#endif

/* --- tiles ------------------------------------------------------------------------------------------------------- */

/* With tiles `wide` times as high as wide, row i has `wide` (i + 1) of them. */
static __device__ __forceinline__ place place_of(const problem &p, int64_t tile)
{
    constexpr int wide = tiling::rows / tiling::cols;
    int64_t t = tile % p.tiles;
    int64_t i = tchi_lower_row(t / wide);
    place at;
    at.matrix = (int)(tile / p.tiles);
    at.row = (int)i * tiling::rows;
    at.col = (int)(t - wide * tchi_lower_tiles(i)) * tiling::cols;
    return at;
}

static __global__ void __launch_bounds__(tiling::threads, tiling::blocks) symmetric_f64_kernel(const problem p)
{
#ifdef HAS_F64_TENSOR_CORES
    extern __shared__ __align__(128) char shared[];
    place at = place_of(p, blockIdx.x);
    if (at.col < p.n) {
        compute_tile(shared, p, at);
    }
#else
    (void)p;
#endif
}

/* --- launching --------------------------------------------------------------------------------------------------- */

static int64_t tiles_of(int64_t n)
{
    return tiling::rows / tiling::cols * tchi_lower_tiles((n + tiling::rows - 1) / tiling::rows);
}

static tch_status launch_tiles(const tchi_cuda_state *state, problem p, int64_t batch)
{
    p.tiles = tiles_of(p.n);
    /* All shared memory for the blocks of a multiprocessor. */
    TCHI_CUDA_TRY(cudaFuncSetAttribute((const void *)symmetric_f64_kernel,
                                       cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
                  "symmetric_f64_kernel");
    return tchi_cuda_launch_shared(state, "symmetric_f64_kernel", symmetric_f64_kernel, (unsigned)(p.tiles * batch),
                                   tiling::threads, tiling::shared_bytes, tiling::shared_bytes, p);
}

/* Limits: the tiles of one matrix fit into a grid, columns fit an int with margin, and 128 row strides in bytes fit 32
 * bits. */
#define MOST_ROWS (1 << 20)
#define MOST_COLUMNS (1 << 30)
#define MOST_LD (1 << 21)

static int rows_are_aligned(const tch_matrices *x)
{
    return (uintptr_t)x->data % 16 == 0 && (x->rows <= 1 || x->ld % 2 == 0) && (x->batch <= 1 || x->stride % 2 == 0);
}

static int is_supported(const tch_matrices *x)
{
    return x->type == TCH_SCALAR_F64 && rows_are_aligned(x) && (x->rows <= 1 || x->ld <= MOST_LD);
}

extern "C" int tchi_cuda_symmetric_f64_supported(const tchi_cuda_state *state, const tch_matrices *,
                                                 const tch_matrices *a, const tch_matrices *b, const tch_matrices *c)
{
    return tchi_cuda_kernel_fits(state, TCHI_SYMMETRIC_F64, a, c) && state->device.minor == 0 &&
           state->device.shared_per_block >= tiling::shared_bytes && is_supported(a) && is_supported(b) &&
           c->rows <= MOST_ROWS && a->cols <= MOST_COLUMNS;
}

static operand operand_of(const tch_matrices *x)
{
    operand o = {NULL, 0, 0};
    if (x != NULL) {
        o.data = (const double *)x->data;
        o.ld = x->ld;
        o.stride = x->stride;
    }
    return o;
}

static problem f64_problem_of(double c0, double c1, const tch_matrices *d, double c2, const tch_matrices *a,
                              const tch_matrices *b, const tch_matrices *c)
{
    problem p = {};
    p.a = operand_of(a);
    p.b = operand_of(b);
    p.d = operand_of(d);
    p.c = c->data;
    p.c_type = c->type;
    p.c_ld = c->ld;
    p.c_stride = c->stride;
    p.n = (int)c->rows;
    p.k = (int)a->cols;
    p.c_paired = rows_are_aligned(c);
    p.d_paired = d != NULL && rows_are_aligned(d);
    p.c0 = c0;
    p.c1 = d == NULL ? 0.0 : c1;
    p.c2 = c2;
    return p;
}

static const double *matrix_from(operand o, int64_t matrix)
{
    return o.data == NULL ? NULL : o.data + matrix * o.stride;
}

/* The matrices of the batch from `first` on. */
static problem part_of(problem p, int64_t first)
{
    static const int64_t element[TCH_SCALAR_COUNT] = {8, 4, 2, 2, 4, 8, 4};
    p.a.data = matrix_from(p.a, first);
    p.b.data = matrix_from(p.b, first);
    p.d.data = matrix_from(p.d, first);
    p.c = (char *)p.c + first * p.c_stride * element[p.c_type];
    return p;
}

/* Blocks of a launch: a grid has at most 2^31 - 1. */
#define MOST_BLOCKS INT64_C(0x40000000)

extern "C" tch_status tchi_cuda_symmetric_f64(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d,
                                              double c2, const tch_matrices *a, const tch_matrices *b,
                                              const tch_matrices *c)
{
    if (c->rows == 0 || c->batch == 0) {
        return TCH_OK;
    }
    const problem p = f64_problem_of(c0, c1, d, c2, a, b, c);
    const int64_t most = MOST_BLOCKS / tiles_of(c->rows);
    for (int64_t first = 0; first < c->batch; first += most) {
        int64_t count = c->batch - first < most ? c->batch - first : most;
        TCHI_TRY(launch_tiles(state, part_of(p, first), count));
    }
    return TCH_OK;
}
