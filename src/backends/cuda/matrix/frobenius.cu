/* The Frobenius norm of each matrix of a batch. Sums depend on their order: a matrix is always divided into the same
 * parts, each summed by one block and added in order by one thread, so that the result is deterministic and independent
 * of the batch. Blocks of one matrix form a cluster, which needs no scratch.
 *
 *     double sum = 0;
 *     for (i = 0; i < rows; i++) {
 *         for (j = 0; j < cols; j++) {
 *             sum += (double)x[i][j] * x[i][j];               // in a unit where squares would leave the range
 *         }
 *     }
 *     norm = sqrt(sum); */
#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/device/batch_walk.cuh"

#define THREADS 256 /* of a block, except for large matrices */

/* From this size on a matrix is divided into 16 parts for blocks of 1024 threads: smaller ones do not pay for the
 * synchronization. A part is every `across`-th strip of columns and every `down`-th strip of rows, across times down
 * being `parts`. */
#define LARGE 65536
#define LARGE_THREADS 1024
#define MOST_PARTS 16

typedef struct partition {
    int32_t parts, across, down;
} partition;

/* Compile-time knowledge: `short_vec4s` for bfloat16 in rows of aligned vec4s. */
enum known { any_type, short_vec4s };

/* Sums over one part, with 64 bytes in flight per thread and 64 KB per multiprocessor, its memory throughput times the
 * 700 ns latency. */
template <typename real>
static __device__ inline double sum_of_vec4(const tchi_cuda_extent &e, const tchi_cuda_operand &x, int64_t b,
                                            int64_t row, int64_t step, int64_t col, int64_t across, double factor)
{
    const int held = 16 / (int)sizeof(real);
    double sum = 0;
    for (int64_t i = row; i < e.rows; i += held * step) {
        for (int64_t j = col; j < e.cols; j += across) {
            tchi_cuda_rows_of_vec4s<real, held> values = tchi_cuda_load_vec4s<real, held>(x, e, b, i, step, j);
#pragma unroll
            for (int k = 0; k < 4 * held; k++) {
                double v = (double)values.row[k / 4].v[k % 4];
                v = sizeof(real) == sizeof(double) ? v * factor : v;
                sum += v * v;
            }
        }
    }
    return sum;
}

static __device__ inline double square_of(uint32_t bits)
{
    double v = (double)__uint_as_float(bits);
    return v * v;
}

/* The same for bfloat16, held in pairs as loaded: converted at once they would exceed the 64 registers of a block of
 * 1024 threads. */
static __device__ inline double sum_of_short_vec4(const tchi_cuda_extent &e, const tchi_cuda_operand &x, int64_t b,
                                                  int64_t row, int64_t step, int64_t col, int64_t across)
{
    const int held = 8;
    double sum = 0;
    for (int64_t i = row; i < e.rows; i += held * step) {
        for (int64_t j = col; j < e.cols; j += across) {
            const char *from = tchi_cuda_at(x, b, i, j);
            int64_t pitch = step * x.ld * 2;
            uint2 four[held];
#pragma unroll
            for (int k = 0; k < held; k++) {
                four[k] = i + k * step < e.rows ? *(const uint2 *)(from + k * pitch) : make_uint2(0, 0);
            }
#pragma unroll
            for (int k = 0; k < held; k++) {
                sum += square_of(four[k].x << 16) + square_of(four[k].x & 0xFFFF0000u);
                sum += square_of(four[k].y << 16) + square_of(four[k].y & 0xFFFF0000u);
            }
        }
    }
    return sum;
}

template <typename real, known what>
static __device__ inline double sum_part(const tchi_cuda_extent &e, const tchi_cuda_operand &x, int64_t b,
                                         const partition &cut, int part, double factor)
{
    int64_t row = (int64_t)(part % cut.down) * blockDim.y + threadIdx.y;
    int64_t col = ((int64_t)(part / cut.down) * blockDim.x + threadIdx.x) * 4;
    int64_t step = (int64_t)cut.down * blockDim.y;
    int64_t across = (int64_t)cut.across * blockDim.x * 4;
    if (what == short_vec4s) {
        return sum_of_short_vec4(e, x, b, row, step, col, across);
    }
    return sum_of_vec4<real>(e, x, b, row, step, col, across, factor);
}

/* A cluster per matrix, whose blocks take parts round-robin. float64 entries are divided by the largest, given in
 * `out`: squares above about 1e150 overflow and below 1e-150 underflow. */
template <typename real, known what, int threads>
static __global__ void __launch_bounds__(threads, LARGE_THREADS / threads)
    frobenius_kernel(tchi_cuda_extent e, tchi_cuda_operand x, partition cut, double *out)
{
    __shared__ double of_warps[MOST_PARTS][threads / 32];
    __shared__ double sums[MOST_PARTS];
    int warp = tchi_cuda_thread_number() / 32;
    int lane = tchi_cuda_thread_number() % 32;
    int rank = tchi_cluster_rank();
    int size = tchi_cluster_size();
    const bool scaled = sizeof(real) == sizeof(double);
    for (int64_t b = blockIdx.x / size; b < e.batch; b += gridDim.x / size) {
        double largest = scaled ? out[b] : 1.0;
        double unit = scaled ? fmax(largest, 0x1p-1022) : 1.0;
        for (int part = rank; part < cut.parts; part += size) {
            double sum = tchi_cuda_warp_sum(sum_part<real, what>(e, x, b, cut, part, 1.0 / unit));
            if (lane == 0) {
                of_warps[part][warp] = sum;
            }
        }
        __syncthreads();
        for (int part = rank + warp * size; part < cut.parts; part += size * (threads / 32)) {
            double sum = tchi_cuda_warp_sum(lane < threads / 32 ? of_warps[part][lane] : 0.0);
            if (lane == 0) {
                sums[part] = sum;
            }
        }
        tchi_cluster_sync();
        if (rank == 0 && tchi_cuda_thread_number() == 0) {
            double sum = 0;
            for (int part = 0; part < cut.parts; part++) {
                sum += *(const double *)tchi_cluster_map(&sums[part], part % size);
            }
            /* of the sum of squares of entries divided by `unit` */
            out[b] = largest == 0 || isinf(largest) ? largest : unit * sqrt(sum);
        }
        tchi_cluster_sync();
    }
}

/* The smallest cluster up to 8 that minimizes the parts per multiprocessor. */
static int even_cluster(const tchi_cuda_state *state, int64_t batch)
{
    int best = 1;
    int64_t least = INT64_MAX;
    for (int size = 1; size <= 8; size *= 2) {
        int64_t parts = tchi_cuda_ceil_div(batch * size, state->device.processors) * (MOST_PARTS / size);
        if (parts < least) {
            least = parts;
            best = size;
        }
    }
    return best;
}

/* Blocks per matrix: as many as parts while the batch leaves multiprocessors idle. Clusters of 16 need an opt-in and
 * are not available on every device. */
template <typename real, known what> static int cluster_for(const tchi_cuda_state *state, int64_t batch, dim3 block)
{
    auto kernel = frobenius_kernel<real, what, LARGE_THREADS>;
    int clusters = 0;
    if (state->device.major < 9) {
        return 1;
    }
    if (batch * 8 >= state->device.processors) {
        return even_cluster(state, batch);
    }
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = tchi_cuda_cluster_config(state, MOST_PARTS, block, 0, MOST_PARTS, &attribute);
    bool possible = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
                    cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters > 0;
    if (!possible) {
        cudaGetLastError();
    }
    return possible ? MOST_PARTS : 8;
}

template <typename real, known what>
static tch_status launch_large(const tchi_cuda_state *state, const tchi_cuda_extent &e, const tch_matrices *x,
                               double *out)
{
    partition cut = e.rows < MOST_PARTS ? partition{MOST_PARTS, MOST_PARTS, 1} : partition{MOST_PARTS, 1, MOST_PARTS};
    cudaLaunchAttribute attribute = {};
    dim3 block = tchi_cuda_reduce_block(e, LARGE_THREADS);
    int size = cluster_for<real, what>(state, e.batch, block);
    unsigned grid = size > 1 ? (unsigned)(e.batch * size) : tchi_cuda_grid(e.batch);
    cudaLaunchConfig_t config = tchi_cuda_cluster_config(state, grid, block, 0, size, &attribute);
    TCHI_CUDA_TRY(
        cudaLaunchKernelEx(&config, frobenius_kernel<real, what, LARGE_THREADS>, e, tchi_cuda_operand_of(x), cut, out),
        "frobenius");
    return tchi_cuda_launched(state, "frobenius");
}

template <typename real>
static tch_status launch_frobenius(const tchi_cuda_state *state, const tch_matrices *x, double *out)
{
    tchi_cuda_extent e = tchi_cuda_extent_of(x);
    if (e.rows * e.cols >= LARGE) {
        return launch_large<real, any_type>(state, e, x, out);
    }
    partition whole = {1, 1, 1};
    return tchi_cuda_launch(state, "frobenius", frobenius_kernel<real, any_type, THREADS>, tchi_cuda_grid(e.batch),
                            tchi_cuda_reduce_block(e, THREADS), e, tchi_cuda_operand_of(x), whole, out);
}

/* A block per matrix at the ends of the range; usually there is none and nothing moves. */
static __global__ void __launch_bounds__(THREADS)
    rescale_kernel(tchi_cuda_extent e, tchi_cuda_operand x, double eps, double *norms)
{
    __shared__ double shared[32];
    const int most = x.type == TCH_SCALAR_F64 ? 1000 : 120;
    for (int64_t b = blockIdx.x; b < e.batch; b += gridDim.x) {
        double norm = norms[b];
        bool ends = norm < ldexp(1.0, -most) || norm > ldexp(1.0, most);
        if (!ends || norm == 0.0 || norm < eps) {
            continue;
        }
        int exponent = isinf(norm) ? most : ilogb(norm);
        double sum = 0;
        for (int64_t i = threadIdx.x; i < e.rows * e.cols; i += THREADS) {
            char *at = tchi_cuda_at(x, b, i / e.cols, i % e.cols);
            double value = ldexp(tchi_cuda_load<double>(x.type, at, 0, x.stride), -exponent);
            tchi_cuda_store<double>(x.type, at, 0, x.stride, value);
            sum += value * value;
        }
        sum = tchi_cuda_block_sum(sum, (int)threadIdx.x, THREADS, shared);
        if (threadIdx.x == 0) {
            norms[b] = sqrt(sum);
        }
        __syncthreads();
    }
}

tch_status tchi_cuda_rescale(const tchi_cuda_state *s, double eps, const tch_matrices *x, double *norm)
{
    tchi_cuda_extent e = tchi_cuda_extent_of(x);
    return tchi_cuda_launch(s, "rescale", rescale_kernel, tchi_cuda_grid(e.batch), THREADS, e, tchi_cuda_operand_of(x),
                            eps, norm);
}

tch_status tchi_cuda_frobenius(const tchi_cuda_state *state, const tch_matrices *x, double *out)
{
    if (x->rows == 0 || x->cols == 0) {
        return tchi_cuda_clear(state, x->batch, out);
    }
    if (x->type == TCH_SCALAR_BF16 && x->rows * x->cols >= LARGE && x->cols % 4 == 0 && tchi_cuda_operand_of(x).wide) {
        return launch_large<float, short_vec4s>(state, {x->rows, x->cols, x->batch}, x, out);
    }
    if (x->type != TCH_SCALAR_F64) {
        return launch_frobenius<float>(state, x, out);
    }
    TCHI_TRY(tchi_cuda_scan(state, x, out, NULL));
    return launch_frobenius<double>(state, x, out);
}
