/* Elementwise operations on a batch of matrices: the grid is columns by rows by matrices, and a thread loads a patch of
 * four columns and TCHI_CUDA_PATCH_STEPS rows before it stores any, which makes in-place operation safe. */
#ifndef TCHI_CUDA_PATCHES_CUH
#define TCHI_CUDA_PATCHES_CUH

#include "elements.cuh"

#define TCHI_CUDA_PATCH_THREADS 256 /* of a block */

/* Rows per thread. Two make 32 bytes of float32 in flight per thread and at least 32 KB per multiprocessor; an H200
 * needs about 25 KB to hide its memory latency (700 ns at 4.8 TB/s over 132 multiprocessors). */
#define TCHI_CUDA_PATCH_STEPS 2

/* --- walking a batch --------------------------------------------------------------------------------------------- */

typedef struct tchi_cuda_extent {
    int64_t rows, cols, batch;
} tchi_cuda_extent;

/* A thread's patch: rows i, i + step, ..., columns j to j + count of matrix b. */
typedef struct tchi_cuda_patch {
    int64_t b, i, j, step, rows;
    int count;
} tchi_cuda_patch;

template <typename real> struct tchi_cuda_patch_values {
    tchi_cuda_vec4<real> row[TCHI_CUDA_PATCH_STEPS];
};

static __device__ inline tchi_cuda_patch tchi_cuda_first_patch(const tchi_cuda_extent &e)
{
    int64_t j = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    int64_t left = e.cols - j;
    return {blockIdx.z, 0, j, blockDim.y, e.rows, left < 0 ? 0 : left < 4 ? (int)left : 4};
}

static __device__ inline int64_t tchi_cuda_first_row()
{
    return (int64_t)blockIdx.y * blockDim.y * TCHI_CUDA_PATCH_STEPS + threadIdx.y;
}

/* From one patch of a matrix to the thread's next one below it. */
static __device__ inline int64_t tchi_cuda_row_stride()
{
    return (int64_t)gridDim.y * blockDim.y * TCHI_CUDA_PATCH_STEPS;
}

template <typename real>
static __device__ inline tchi_cuda_patch_values<real> tchi_cuda_load_patch(const tchi_cuda_operand &m,
                                                                           const tchi_cuda_patch &p)
{
    tchi_cuda_patch_values<real> values;
#pragma unroll
    for (int k = 0; k < TCHI_CUDA_PATCH_STEPS; k++) {
        int64_t i = p.i + k * p.step;
        values.row[k] = tchi_cuda_load_vec4<real>(m, p.b, i, p.j, i < p.rows ? p.count : 0);
    }
    return values;
}

template <typename real>
static __device__ inline void tchi_cuda_store_patch(const tchi_cuda_operand &m, const tchi_cuda_patch &p,
                                                    const tchi_cuda_patch_values<real> &values)
{
#pragma unroll
    for (int k = 0; k < TCHI_CUDA_PATCH_STEPS; k++) {
        int64_t i = p.i + k * p.step;
        tchi_cuda_store_vec4<real>(m, p.b, i, p.j, i < p.rows ? p.count : 0, values.row[k]);
    }
}

/* --- launching --------------------------------------------------------------------------------------------------- */

static inline tchi_cuda_extent tchi_cuda_extent_of(const tch_matrices *m)
{
    return {m->rows, m->cols, m->batch};
}

static inline bool tchi_cuda_is_empty(const tchi_cuda_extent &e)
{
    return e.rows == 0 || e.cols == 0 || e.batch == 0;
}

typedef struct tchi_cuda_launch_shape {
    dim3 grid, block;
} tchi_cuda_launch_shape;

static inline tchi_cuda_launch_shape tchi_cuda_shape_for(const tchi_cuda_extent &e,
                                                         int64_t steps = TCHI_CUDA_PATCH_STEPS)
{
    dim3 block = tchi_cuda_block_for(tchi_cuda_ceil_div(e.cols, 4), e.rows, TCHI_CUDA_PATCH_THREADS);
    int64_t across = tchi_cuda_ceil_div(e.cols, (int64_t)block.x * 4);
    int64_t down = tchi_cuda_ceil_div(e.rows, (int64_t)block.y * steps);
    return {dim3(tchi_cuda_grid(across), tchi_cuda_grid_yz(down), tchi_cuda_grid_yz(e.batch)), block};
}

/* Calls work(patch) for every patch. */
template <class function>
static __global__ void __launch_bounds__(TCHI_CUDA_PATCH_THREADS, 3)
    walk_kernel(tchi_cuda_extent e, const __grid_constant__ function work)
{
    tchi_cuda_patch p = tchi_cuda_first_patch(e);
    for (; p.b < e.batch; p.b += gridDim.z) {
        for (p.i = tchi_cuda_first_row(); p.i < e.rows; p.i += tchi_cuda_row_stride()) {
            work(p);
        }
    }
}

template <class function>
static tch_status tchi_cuda_walk(const void *state, const char *name, const tch_matrices *over, const function &work)
{
    tchi_cuda_extent e = tchi_cuda_extent_of(over);
    tchi_cuda_launch_shape shape = tchi_cuda_shape_for(e);
    return tchi_cuda_launch(state, name, walk_kernel<function>, shape.grid, shape.block, e, work);
}

/* --- reductions -------------------------------------------------------------------------------------------------- */

static inline tch_status tchi_cuda_clear(const tchi_cuda_state *state, int64_t count, double *results)
{
    return tchi_cuda_check(cudaMemsetAsync(results, 0, (size_t)count * sizeof *results, state->stream), "clear");
}

/* Largest entry, or number of entries that are not finite; the other is NULL. */
tch_status tchi_cuda_scan(const tchi_cuda_state *state, const tch_matrices *x, double *max_abs, double *nonfinite);

tch_status tchi_cuda_frobenius(const tchi_cuda_state *state, const tch_matrices *x, double *out);

/* A block of whole warps, as wide as rows of vec4s need. */
static inline dim3 tchi_cuda_reduce_block(const tchi_cuda_extent &e, int64_t threads)
{
    dim3 block = tchi_cuda_block_for(tchi_cuda_ceil_div(e.cols, 4), e.rows, threads);
    block.y = (unsigned)threads / block.x;
    return block;
}

static __device__ inline int tchi_cuda_thread_number()
{
    return (int)(threadIdx.y * blockDim.x + threadIdx.x);
}

/* vec4s of rows i, i + step, ... from column j on; zeros outside the matrix. */
template <typename real, int count> struct tchi_cuda_rows_of_vec4s {
    tchi_cuda_vec4<real> row[count];
};

template <typename real, int count>
static __device__ inline tchi_cuda_rows_of_vec4s<real, count> tchi_cuda_load_vec4s(const tchi_cuda_operand &x,
                                                                                   const tchi_cuda_extent &e, int64_t b,
                                                                                   int64_t i, int64_t step, int64_t j)
{
    tchi_cuda_rows_of_vec4s<real, count> values;
    int inside = e.cols - j < 4 ? (int)(e.cols - j) : 4;
    const char *from = tchi_cuda_at(x, b, i, j);
    int64_t pitch = step * x.ld * tchi_cuda_size(x.type);
#pragma unroll
    for (int k = 0; k < count; k++) {
        values.row[k] = tchi_cuda_load_from<real>(x, from + k * pitch, i + k * step < e.rows ? inside : 0);
    }
    return values;
}

#endif
