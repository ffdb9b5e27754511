/* Reductions: one number per matrix. Maxima and counts are independent of order, so all blocks of the device share a
 * matrix and combine results by atomics. The sum of squares is not, see frobenius.cu.
 *
 *     for (i = 0; i < n; i++) {
 *         for (j = 0; j < n; j++) {
 *             max_abs = max(max_abs, fabs(x[i][j]));
 *             nonfinite += !isfinite(x[i][j]);
 *             asymmetry = max(asymmetry, fabs(x[i][j] - x[j][i]));
 *         }
 *     } */
#include "backends/cuda/device/batch_walk.cuh"
#include "core/arith.h"

#define THREADS 256       /* of a block */
#define BLOCKS_PER_UNIT 8 /* blocks of 256 threads that fill a multiprocessor */

/* Blocks per matrix, so that the batch fills the device about once. */
static int64_t share_of(const tchi_cuda_state *state, int64_t batch)
{
    int64_t share = (int64_t)state->device.processors * BLOCKS_PER_UNIT / batch;
    return share > 1 ? share : 1;
}

/* --- combining results ------------------------------------------------------------------------------------------- */

/* Nonnegative doubles compare like their bits. */
static __device__ inline void raise_to(double *out, double value)
{
    if (value > 0) {
        atomicMax((unsigned long long *)out, (unsigned long long)__double_as_longlong(value));
    }
}

/* Per-thread results. Comparisons skip NaN. */
template <typename real> struct tally {
    real largest, gap;
    unsigned nonfinite;
};

template <typename real> static __device__ inline void tally_value(tally<real> &seen, real value)
{
    real size = value < 0 ? -value : value;
    seen.largest = size > seen.largest ? size : seen.largest;
    seen.nonfinite += isfinite(value) ? 0u : 1u;
}

template <typename real> static __device__ inline void compare(tally<real> &seen, real a, real b)
{
    real gap = a < b ? b - a : a - b;
    seen.gap = gap > seen.gap ? gap : seen.gap;
}

/* All threads of the block call this. Counts are sums of integers, exact in any order. */
template <typename real>
static __device__ inline void report(const tally<real> &seen, double *max_abs, double *nonfinite, double *asymmetry)
{
    __shared__ double shared[32];
    int thread = tchi_cuda_thread_number();
    if (max_abs != NULL) {
        double largest = tchi_cuda_block_max((double)seen.largest, thread, THREADS, shared);
        if (thread == 0) {
            raise_to(max_abs, largest);
        }
    }
    if (nonfinite != NULL) {
        double count = tchi_cuda_block_sum((double)seen.nonfinite, thread, THREADS, shared);
        if (thread == 0 && count > 0) {
            atomicAdd(nonfinite, count);
        }
    }
    if (asymmetry != NULL) {
        double gap = tchi_cuda_block_max((double)seen.gap, thread, THREADS, shared);
        if (thread == 0) {
            raise_to(asymmetry, gap);
        }
    }
}

static __device__ inline double *entry_or_null(double *array, int64_t b)
{
    return array != NULL ? array + b : NULL;
}

/* --- largest entry, non-finite entries --------------------------------------------------------------------------- */

/* Calls look(element) for a thread's share of a matrix, grid-stride over columns, rows and matrices. */
template <typename real, class function>
static __device__ inline void visit_elements(const tchi_cuda_extent &e, const tchi_cuda_operand &x, int64_t b,
                                             const function &look)
{
    const int held = 2;
    int64_t step = (int64_t)gridDim.y * blockDim.y;
    for (int64_t i = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; i < e.rows; i += held * step) {
        for (int64_t j = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4; j < e.cols;
             j += (int64_t)gridDim.x * blockDim.x * 4) {
            tchi_cuda_rows_of_vec4s<real, held> values = tchi_cuda_load_vec4s<real, held>(x, e, b, i, step, j);
#pragma unroll
            for (int k = 0; k < 4 * held; k++) {
                look(values.row[k / 4].v[k % 4]);
            }
        }
    }
}

template <typename real>
static __global__ void __launch_bounds__(THREADS)
    scan_kernel(tchi_cuda_extent e, tchi_cuda_operand x, double *max_abs, double *nonfinite)
{
    for (int64_t b = blockIdx.z; b < e.batch; b += gridDim.z) {
        tally<real> seen = {};
        visit_elements<real>(e, x, b, [&](real value) { tally_value(seen, value); });
        report(seen, entry_or_null(max_abs, b), entry_or_null(nonfinite, b), (double *)NULL);
    }
}

static dim3 grid_for(const tchi_cuda_state *state, const tchi_cuda_extent &e, const dim3 &block)
{
    int64_t share = share_of(state, e.batch);
    int64_t across = tchi_min(tchi_cuda_ceil_div(e.cols, (int64_t)block.x * 4), share);
    int64_t down = tchi_min(tchi_cuda_ceil_div(e.rows, block.y), tchi_cuda_ceil_div(share, across));
    return dim3((unsigned)across, (unsigned)down, tchi_cuda_grid_yz(e.batch));
}

tch_status tchi_cuda_scan(const tchi_cuda_state *state, const tch_matrices *x, double *max_abs, double *nonfinite)
{
    tchi_cuda_extent e = tchi_cuda_extent_of(x);
    TCHI_TRY(tchi_cuda_clear(state, e.batch, max_abs != NULL ? max_abs : nonfinite));
    if (e.rows == 0 || e.cols == 0) {
        return TCH_OK;
    }
    dim3 block = tchi_cuda_reduce_block(e, THREADS);
    dim3 grid = grid_for(state, e, block);
    auto kernel = x->type == TCH_SCALAR_F64 ? scan_kernel<double> : scan_kernel<float>;
    return tchi_cuda_launch(state, "scan", kernel, grid, block, e, tchi_cuda_operand_of(x), max_abs, nonfinite);
}

/* --- overflow ---------------------------------------------------------------------------------------------------- */

/* A NaN is above any limit. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    overflow_kernel(tchi_cuda_extent e, tchi_cuda_operand x, double most, int32_t *flags)
{
    for (int64_t b = blockIdx.z; b < e.batch; b += gridDim.z) {
        bool beyond = false;
        visit_elements<real>(e, x, b, [&](real value) { beyond = beyond || !(fabs((double)value) <= most); });
        if (__syncthreads_or(beyond) && tchi_cuda_thread_number() == 0) {
            atomicCAS(flags + b, (int)TCH_REPORT_OK, (int)TCH_REPORT_OVERFLOW);
        }
    }
}

tch_status tchi_cuda_flag_overflow(void *state, const tch_matrices *x, double most, int32_t *flags)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    tchi_cuda_extent e = tchi_cuda_extent_of(x);
    if (e.rows == 0 || e.cols == 0 || e.batch == 0) {
        return TCH_OK;
    }
    dim3 block = tchi_cuda_reduce_block(e, THREADS);
    dim3 grid = grid_for(s, e, block);
    auto kernel = x->type == TCH_SCALAR_F64 ? overflow_kernel<double> : overflow_kernel<float>;
    return tchi_cuda_launch(s, "overflow", kernel, grid, block, e, tchi_cuda_operand_of(x), most, flags);
}

/* --- asymmetry, and all three at once ---------------------------------------------------------------------------- */

/* A tile on or below the diagonal. */
typedef struct tile_pair {
    int64_t row, col;
} tile_pair;

static __device__ inline tile_pair pair_at(int64_t number)
{
    int64_t row = tchi_lower_row(number);
    return {row, number - tchi_lower_tiles(row)};
}

#define TILE 64

/* Four adjacent elements of a row, zeros beyond the edges; with `whole`, aligned vectors of a type known at compile
 * time. */
template <typename real, bool whole>
static __device__ inline tchi_cuda_vec4<real> load_four(const tchi_cuda_operand &x, const char *matrix, int64_t n,
                                                        int64_t i, int64_t j)
{
    const char *from = matrix + (i * x.ld + j) * tchi_cuda_size(whole ? TCH_SCALAR_F32 : x.type);
    if (whole) {
        return i < n && j < n ? tchi_cuda_load_wide<real>(TCH_SCALAR_F32, from, 0, 0) : tchi_cuda_vec4<real>{};
    }
    return tchi_cuda_load_from<real>(x, from, i < n && j < n ? (int)(n - j < 4 ? n - j : 4) : 0);
}

template <typename real> static __device__ inline void tally_four(tally<real> &seen, const tchi_cuda_vec4<real> &four)
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        tally_value(seen, four.v[e]);
    }
}

/* Compares a tile with its mirror image, transposed through shared memory. */
template <typename real, bool whole>
static __device__ inline void inspect_pair(tally<real> &seen, const tchi_cuda_operand &x, const char *matrix, int64_t n,
                                           tile_pair tile, real image[TILE][TILE + 1])
{
    constexpr int step = THREADS / (TILE / 4), held = TILE / step;
    const int row = (int)threadIdx.x / (TILE / 4);
    const int col = (int)threadIdx.x % (TILE / 4) * 4;
    tchi_cuda_vec4<real> here[held], there[held];
#pragma unroll
    for (int k = 0; k < held; k++) {
        int64_t r = row + k * step;
        here[k] = load_four<real, whole>(x, matrix, n, tile.row * TILE + r, tile.col * TILE + col);
        there[k] = load_four<real, whole>(x, matrix, n, tile.col * TILE + r, tile.row * TILE + col);
    }
#pragma unroll
    for (int k = 0; k < held; k++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            image[row + k * step][col + e] = there[k].v[e];
        }
        tally_four(seen, here[k]);
        if (tile.row != tile.col) {
            tally_four(seen, there[k]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 4 * held; k++) {
        compare(seen, here[k / 4].v[k % 4], image[col + k % 4][row + k / 4 * step]);
    }
    __syncthreads();
}

template <typename real, bool whole>
static __global__ void __launch_bounds__(THREADS)
    inspect_kernel(int64_t n, int64_t batch, tchi_cuda_operand x, double *max_abs, double *nonfinite, double *asymmetry)
{
    __shared__ real image[TILE][TILE + 1];
    int64_t tiles = tchi_cuda_ceil_div(n, TILE);
    for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
        tally<real> seen = {};
        for (int64_t pair = blockIdx.x; pair < tchi_lower_tiles(tiles); pair += gridDim.x) {
            inspect_pair<real, whole>(seen, x, tchi_cuda_at(x, b, 0, 0), n, pair_at(pair), image);
        }
        report(seen, entry_or_null(max_abs, b), entry_or_null(nonfinite, b), entry_or_null(asymmetry, b));
    }
}

/* out: largest magnitudes, non-finite counts and asymmetries of the batch, or asymmetries alone. */
static tch_status inspect(tchi_cuda_state *s, const tch_matrices *x, bool all, double *out)
{
    double *max_abs = all ? out : NULL, *nonfinite = all ? out + x->batch : NULL;
    double *asymmetry = all ? out + 2 * x->batch : out;
    TCHI_TRY(tchi_cuda_clear(s, (all ? 3 : 1) * x->batch, out));
    if (x->rows == 0) {
        return TCH_OK;
    }
    tchi_cuda_operand from = tchi_cuda_operand_of(x);
    bool wide = x->type == TCH_SCALAR_F32 && x->rows % 4 == 0 && from.wide;
    int64_t pairs = tchi_lower_tiles(tchi_cuda_ceil_div(x->rows, TILE));
    dim3 grid((unsigned)tchi_min(pairs, share_of(s, x->batch)), 1, tchi_cuda_grid_yz(x->batch));
    auto kernel = wide                        ? inspect_kernel<float, true>
                  : x->type == TCH_SCALAR_F64 ? inspect_kernel<double, false>
                                              : inspect_kernel<float, false>;
    return tchi_cuda_launch(s, "inspect", kernel, grid, THREADS, x->rows, x->batch, from, max_abs, nonfinite,
                            asymmetry);
}

/* --- trace ------------------------------------------------------------------------------------------------------- */

/* A block per matrix. */
static __global__ void __launch_bounds__(THREADS) trace_kernel(tchi_cuda_extent e, tchi_cuda_operand x, double *out)
{
    __shared__ double shared[32];
    int64_t n = e.rows < e.cols ? e.rows : e.cols;
    for (int64_t b = blockIdx.x; b < e.batch; b += gridDim.x) {
        double sum = 0;
        for (int64_t i = threadIdx.x; i < n; i += THREADS) {
            sum += tchi_cuda_load<double>(x.type, tchi_cuda_at(x, b, i, i), 0, x.stride);
        }
        sum = tchi_cuda_block_sum(sum, (int)threadIdx.x, THREADS, shared);
        if (threadIdx.x == 0) {
            out[b] = sum;
        }
    }
}

/* --- the operation ----------------------------------------------------------------------------------------------- */

tch_status tchi_cuda_reduce(void *state, tch_reduction kind, const tch_matrices *x, double *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    if (x->batch == 0) {
        return TCH_OK;
    }
    switch (kind) {
    case TCH_REDUCE_FROBENIUS:
        return tchi_cuda_frobenius(s, x, out);
    case TCH_REDUCE_TRACE:
        return tchi_cuda_launch(s, "trace", trace_kernel, tchi_cuda_grid(x->batch), THREADS, tchi_cuda_extent_of(x),
                                tchi_cuda_operand_of(x), out);
    case TCH_REDUCE_MAX_ABS:
        return tchi_cuda_scan(s, x, out, NULL);
    case TCH_REDUCE_NONFINITE:
        return tchi_cuda_scan(s, x, NULL, out);
    case TCH_REDUCE_INSPECT:
        return inspect(s, x, true, out);
    default:
        return inspect(s, x, false, out);
    }
}
