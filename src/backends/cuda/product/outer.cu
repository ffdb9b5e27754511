/* Outer products, C = alpha x y': products with a contraction of one, such as per-sample gradients of a linear layer.
 * Bound by writing C: a thread keeps four elements of y and writes rows. */
#include "backends/cuda/device/elements.cuh"

#define THREADS 256
#define ROWS 4 /* for which a thread loads x before it writes the first */
/* Rows per thread; a block of 256 threads across 1024 columns then writes 128 KB: bench/logs/cuda_outer.md. */
#define ROWS_OF_THREAD 32

typedef struct outer_problem {
    tchi_cuda_operand x, y, c; /* x and y with their own stride, ld, between elements */
    int64_t rows, cols, batch;
    double alpha;
} outer_problem;

template <typename real>
static __device__ __forceinline__ real element_of(const tchi_cuda_operand &v, int64_t b, int64_t i)
{
    return tchi_cuda_load<real>(v.type, v.data, b * v.stride + i * v.ld, 0);
}

/* Aligned float32 rows bypass the caches. */
template <typename real>
static __device__ __forceinline__ void write_four(const outer_problem &p, int64_t b, int64_t i, int64_t j, int count,
                                                  real x, const tchi_cuda_vec4<real> &y)
{
    tchi_cuda_vec4<real> four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        four.v[k] = x * y.v[k];
    }
    if (p.c.type == TCH_SCALAR_F32 && p.c.wide && count == 4) {
        __stcs((float4 *)tchi_cuda_at(p.c, b, i, j),
               make_float4((float)four.v[0], (float)four.v[1], (float)four.v[2], (float)four.v[3]));
    } else {
        tchi_cuda_store_vec4<real>(p.c, b, i, j, count, four);
    }
}

/* One multiplication per element. Writing C of 256 samples of 1024 by 1024 in float32 is 1.07 GB, 0.26 ms at 4.19
 * TB/s. */
template <typename real> static __global__ void __launch_bounds__(THREADS, 2) outer_product(const outer_problem p)
{
    int64_t j = 4 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    int count = j >= p.cols ? 0 : p.cols - j < 4 ? (int)(p.cols - j) : 4;
    int64_t step = blockDim.y;
    for (int64_t b = blockIdx.z; b < p.batch; b += gridDim.z) {
        tchi_cuda_vec4<real> y;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            y.v[k] = k < count ? element_of<real>(p.y, b, j + k) : (real)0;
        }
        for (int64_t block = blockIdx.y; block * step * ROWS_OF_THREAD < p.rows; block += gridDim.y) {
            int64_t first = block * step * ROWS_OF_THREAD + threadIdx.y;
            for (int r = 0; r < ROWS_OF_THREAD; r += ROWS) {
                real x[ROWS];
#pragma unroll
                for (int k = 0; k < ROWS; k++) {
                    int64_t i = first + (r + k) * step;
                    x[k] = i < p.rows ? (real)p.alpha * element_of<real>(p.x, b, i) : (real)0;
                }
#pragma unroll
                for (int k = 0; k < ROWS; k++) {
                    int64_t i = first + (r + k) * step;
                    write_four<real>(p, b, i, j, i < p.rows ? count : 0, x[k], y);
                }
            }
        }
    }
}

/* A vector's elements are `apart` from each other. */
static tchi_cuda_operand vector_of(const tch_matrices *m, int64_t apart)
{
    return {(char *)m->data, m->type, 0, apart, m->stride};
}

extern "C" tch_status tchi_cuda_outer(tchi_cuda_state *state, double alpha, const tch_matrices *a, int32_t transpose_a,
                                      const tch_matrices *b, int32_t transpose_b, const tch_matrices *c)
{
    outer_problem p = {vector_of(a, transpose_a ? 1 : a->ld),
                       vector_of(b, transpose_b ? b->ld : 1),
                       tchi_cuda_operand_of(c),
                       c->rows,
                       c->cols,
                       c->batch,
                       alpha};
    unsigned x = 32;
    while (x < THREADS && 4 * (int64_t)x < p.cols) {
        x *= 2;
    }
    dim3 block(x, THREADS / x);
    dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(p.cols, 4 * (int64_t)x)),
              tchi_cuda_grid_yz(tchi_cuda_ceil_div(p.rows, (int64_t)block.y * ROWS_OF_THREAD)),
              tchi_cuda_grid_yz(p.batch));
    auto kernel = c->type == TCH_SCALAR_F64 ? outer_product<double> : outer_product<float>;
    return tchi_cuda_launch(state, "outer_product", kernel, grid, block, p);
}
