/* Sums over the positions of each sample, column by column. Positions are divided into chunks by their number alone; a
 * block sums a chunk, four columns per thread, and a second kernel adds the chunks in order: results are deterministic
 * and independent of the batch. The summands come from `terms`, a struct with
 *
 *     static const int outputs;
 *     void load(int64_t b, int64_t i, int64_t j, int count, tchi_cuda_vec4<real> *values) const;
 *
 * which loads the terms of position i of sample b in columns j to j + count for each of its outputs, zeros beyond. */
#ifndef TCHI_CUDA_POSITION_SUMS_CUH
#define TCHI_CUDA_POSITION_SUMS_CUH

#include "backends/cuda/device/elements.cuh"

#define TCHI_CUDA_SUM_THREADS 256
#define TCHI_CUDA_SUM_AT_ONCE 8     /* vec4s in flight per thread */
#define TCHI_CUDA_SUM_POSITIONS 128 /* minimum per chunk */
#define TCHI_CUDA_SUM_CHUNKS 256    /* maximum per sample */

typedef struct tchi_cuda_sum_extent {
    int64_t batch, rows, cols;
    int64_t chunk, chunks; /* positions per chunk, and chunks */
} tchi_cuda_sum_extent;

static inline tchi_cuda_sum_extent tchi_cuda_sum_extent_of(int64_t batch, int64_t rows, int64_t cols)
{
    int64_t chunk = tchi_cuda_ceil_div(rows, TCHI_CUDA_SUM_CHUNKS);
    chunk = chunk > TCHI_CUDA_SUM_POSITIONS ? chunk : TCHI_CUDA_SUM_POSITIONS;
    int64_t chunks = rows > 0 ? tchi_cuda_ceil_div(rows, chunk) : 1;
    return {batch, rows, cols, chunk, chunks};
}

/* Scratch for the sums of chunks; none if there is one chunk. */
static inline int64_t tchi_cuda_sum_scratch(int64_t batch, int64_t rows, int64_t cols, int64_t outputs)
{
    tchi_cuda_sum_extent e = tchi_cuda_sum_extent_of(batch, rows, cols);
    return e.chunks > 1 ? batch * e.chunks * cols * outputs * (int64_t)sizeof(double) : 0;
}

/* Row b of each output = beta times itself + scale times a sum. Outputs without data are skipped. */
template <int outputs> struct tchi_cuda_sum_target {
    tchi_cuda_operand out[outputs];
    double scale, beta;
};

template <int outputs>
static __device__ inline void tchi_cuda_put_sum(const tchi_cuda_sum_target<outputs> &target, int output, int64_t b,
                                                int64_t j, double sum)
{
    const tchi_cuda_operand &out = target.out[output];
    if (out.data != NULL) {
        char *to = tchi_cuda_at(out, 0, b, j);
        double before = target.beta != 0.0 ? target.beta * tchi_cuda_load<double>(out.type, to, 0, 0) : 0.0;
        tchi_cuda_store<double>(out.type, to, 0, 0, before + target.scale * sum);
    }
}

/* Sums of a thread's four columns over its positions of a chunk. */
template <typename real, typename terms>
static __device__ inline void tchi_cuda_sum_positions(const terms &from, int64_t b, int64_t first, int64_t last,
                                                      int64_t j, int count, tchi_cuda_vec4<real> *sums)
{
    constexpr int at_once = TCHI_CUDA_SUM_AT_ONCE / terms::outputs;
    const int64_t step = blockDim.y;
    for (int64_t i = first + threadIdx.y; i < last && count > 0; i += at_once * step) {
        tchi_cuda_vec4<real> values[at_once][terms::outputs];
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            from.load(b, i + k * step, j, i + k * step < last ? count : 0, values[k]);
        }
#pragma unroll
        for (int k = 0; k < at_once * terms::outputs * 4; k++) {
            int output = k / 4 % terms::outputs;
            sums[output].v[k % 4] += values[k / (4 * terms::outputs)][output].v[k % 4];
        }
    }
}

/* Sums over the rows of a block of threads; the first row gets the result. */
static __device__ inline void tchi_cuda_add_rows(double (*shared)[4])
{
    int thread = (int)(threadIdx.y * blockDim.x + threadIdx.x);
    for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half) {
            for (int k = 0; k < 4; k++) {
                shared[thread][k] += shared[thread + half * blockDim.x][k];
            }
        }
    }
}

/* Memory: what `terms` loads, once. Compute: a sum per term. Grid: columns, chunks, samples. */
template <typename real, typename terms>
static __global__ void __launch_bounds__(TCHI_CUDA_SUM_THREADS, sizeof(real) == sizeof(double) ? 2 : 3)
    position_sums_kernel(const __grid_constant__ terms from, tchi_cuda_sum_extent e,
                         const __grid_constant__ tchi_cuda_sum_target<terms::outputs> target, double *partial)
{
    __shared__ double shared[TCHI_CUDA_SUM_THREADS][4];
    const int thread = (int)(threadIdx.y * blockDim.x + threadIdx.x);
    const int64_t j = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    const int64_t left = e.cols - j;
    const int count = left < 0 ? 0 : left < 4 ? (int)left : 4;
    const int64_t first = blockIdx.y * e.chunk;
    const int64_t last = first + e.chunk < e.rows ? first + e.chunk : e.rows;
    for (int64_t b = blockIdx.z; b < e.batch; b += gridDim.z) {
        tchi_cuda_vec4<real> sums[terms::outputs] = {};
        tchi_cuda_sum_positions<real>(from, b, first, last, j, count, sums);
#pragma unroll
        for (int output = 0; output < terms::outputs; output++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                shared[thread][k] = (double)sums[output].v[k];
            }
            tchi_cuda_add_rows(shared);
            for (int k = 0; k < count && threadIdx.y == 0; k++) {
                if (e.chunks == 1) {
                    tchi_cuda_put_sum(target, output, b, j + k, shared[thread][k]);
                } else {
                    partial[((b * terms::outputs + output) * e.chunks + blockIdx.y) * e.cols + j + k] =
                        shared[thread][k];
                }
            }
            __syncthreads();
        }
    }
}

/* A thread per sum. */
template <int outputs>
static __global__ void __launch_bounds__(TCHI_CUDA_SUM_THREADS)
    add_chunks_kernel(tchi_cuda_sum_extent e, const __grid_constant__ tchi_cuda_sum_target<outputs> target,
                      const double *partial)
{
    int64_t total = e.batch * outputs * e.cols;
    for (int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; n < total; n += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = n / e.cols;
        int64_t j = n - row * e.cols;
        const double *from = partial + row * e.chunks * e.cols + j;
        double sum = 0;
        for (int64_t p = 0; p < e.chunks; p++) {
            sum += from[p * e.cols];
        }
        tchi_cuda_put_sum(target, (int)(row % outputs), row / outputs, j, sum);
    }
}

template <typename real, typename terms>
static tch_status tchi_cuda_run_sums(const tchi_cuda_state *state, const tchi_cuda_sum_extent &e, const terms &from,
                                     const tchi_cuda_sum_target<terms::outputs> &target, void *scratch,
                                     const char *name)
{
    if (e.batch == 0 || e.cols == 0) {
        return TCH_OK;
    }
    double *partial = (double *)scratch;
    dim3 block =
        tchi_cuda_block_for(tchi_cuda_ceil_div(e.cols, 4), e.chunk < e.rows ? e.chunk : e.rows, TCHI_CUDA_SUM_THREADS);
    dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(e.cols, (int64_t)block.x * 4)), (unsigned)e.chunks,
              tchi_cuda_grid_yz(e.batch));
    TCHI_TRY(tchi_cuda_launch(state, name, position_sums_kernel<real, terms>, grid, block, from, e, target, partial));
    if (e.chunks == 1) {
        return TCH_OK;
    }
    unsigned blocks = tchi_cuda_grid(tchi_cuda_ceil_div(e.batch * terms::outputs * e.cols, TCHI_CUDA_SUM_THREADS));
    return tchi_cuda_launch(state, "add_chunks", add_chunks_kernel<terms::outputs>, blocks, TCHI_CUDA_SUM_THREADS, e,
                            target, partial);
}

#endif
