/* What reduce.cu and frobenius.cu share: the shape of a block, rows read in vec4s, and the parts of one that the other
 * needs. */
#ifndef TCHI_CUDA_REDUCE_CUH
#define TCHI_CUDA_REDUCE_CUH

#include "batch_walk.cuh"

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
    int wanted = e.cols - j < 4 ? (int)(e.cols - j) : 4;
    const char *from = tchi_cuda_at(x, b, i, j);
    int64_t pitch = step * x.ld * tchi_cuda_size(x.type);
#pragma unroll
    for (int k = 0; k < count; k++) {
        values.row[k] = tchi_cuda_load_from<real>(x, from + k * pitch, i + k * step < e.rows ? wanted : 0);
    }
    return values;
}

#endif
