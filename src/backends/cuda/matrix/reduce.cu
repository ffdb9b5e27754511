/* Reductions: one number per matrix. Maxima and counts do not depend on the order they are taken in, so all blocks of
 * the device share a matrix and meet in atomic operations on the result. The sum of squares does, and is in
 * frobenius.cu.
 *
 *     for (i = 0; i < n; i++) {
 *         for (j = 0; j < n; j++) {
 *             max_abs = max(max_abs, fabs(x[i][j]));
 *             nonfinite += !isfinite(x[i][j]);
 *             asymmetry = max(asymmetry, fabs(x[i][j] - x[j][i]));
 *         }
 *     }
 */
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/device/triangle.cuh"
#include "core/arith.h"

#define THREADS 256       /* of a block */
#define BLOCKS_PER_UNIT 8 /* blocks of 256 threads that fill a multiprocessor */
#define TILE 32

/* Blocks that share one matrix, so that the batch fills the device about once. */
static int64_t share_of(const tchi_cuda_state *state, int64_t batch)
{
    int64_t share = (int64_t)state->device.processors * BLOCKS_PER_UNIT / batch;
    return share > 1 ? share : 1;
}

/* --- meeting in the result --------------------------------------------------------------------------------------- */

/* Results start at zero; a NULL one is not wanted. */
static __global__ void __launch_bounds__(THREADS) clear_kernel(int64_t batch, double *a, double *b, double *c)
{
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < batch; i += (int64_t)gridDim.x * THREADS) {
        if (a != NULL) {
            a[i] = 0;
        }
        if (b != NULL) {
            b[i] = 0;
        }
        if (c != NULL) {
            c[i] = 0;
        }
    }
}

tch_status tchi_cuda_clear(const tchi_cuda_state *state, int64_t batch, double *a, double *b, double *c)
{
    unsigned blocks = tchi_cuda_grid(tchi_cuda_ceil_div(batch, THREADS));
    clear_kernel<<<blocks, THREADS, 0, state->stream>>>(batch, a, b, c);
    return tchi_cuda_launched(state, "clear");
}

/* Doubles that are not negative are ordered as their bits are. */
static __device__ inline void raise_to(double *out, double value)
{
    if (value > 0) {
        atomicMax((unsigned long long *)out, (unsigned long long)__double_as_longlong(value));
    }
}

/* What one thread has seen. Comparisons that NaN fails pass it over. */
template <typename real> struct tally {
    real largest, gap;
    unsigned nonfinite;
};

template <typename real> static __device__ inline void look_at(tally<real> &seen, real value)
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

/* --- largest entry, entries that are not finite ------------------------------------------------------------------ */

/* Reads every element once: grid columns by rows by matrices, each walked on by the grid's size. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    scan_kernel(tchi_cuda_extent e, tchi_cuda_operand x, double *max_abs, double *nonfinite)
{
    const int held = 2;
    int64_t step = (int64_t)gridDim.y * blockDim.y;
    for (int64_t b = blockIdx.z; b < e.batch; b += gridDim.z) {
        tally<real> seen = {};
        for (int64_t i = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; i < e.rows; i += held * step) {
            for (int64_t j = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4; j < e.cols;
                 j += (int64_t)gridDim.x * blockDim.x * 4) {
                tchi_cuda_rows_of_vec4s<real, held> values = tchi_cuda_load_vec4s<real, held>(x, e, b, i, step, j);
#pragma unroll
                for (int k = 0; k < 4 * held; k++) {
                    look_at(seen, values.row[k / 4].v[k % 4]);
                }
            }
        }
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
    tchi_cuda_extent e = {x->rows, x->cols, x->batch};
    TCHI_CUDA_PASS(tchi_cuda_clear(state, e.batch, max_abs, nonfinite, NULL));
    if (e.rows == 0 || e.cols == 0) {
        return TCH_OK;
    }
    dim3 block = tchi_cuda_reduce_block(e, THREADS);
    dim3 grid = grid_for(state, e, block);
    auto kernel = x->type == TCH_SCALAR_F64 ? scan_kernel<double> : scan_kernel<float>;
    kernel<<<grid, block, 0, state->stream>>>(e, tchi_cuda_operand_of(x), max_abs, nonfinite);
    return tchi_cuda_launched(state, "scan");
}

/* --- results beyond a range -------------------------------------------------------------------------------------- */

/* Reads every element once, as scan_kernel does. NaN is not at most anything. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    overflow_kernel(tchi_cuda_extent e, tchi_cuda_operand x, double most, int32_t *flags)
{
    const int held = 2;
    int64_t step = (int64_t)gridDim.y * blockDim.y;
    for (int64_t b = blockIdx.z; b < e.batch; b += gridDim.z) {
        bool beyond = false;
        for (int64_t i = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; i < e.rows; i += held * step) {
            for (int64_t j = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4; j < e.cols;
                 j += (int64_t)gridDim.x * blockDim.x * 4) {
                tchi_cuda_rows_of_vec4s<real, held> values = tchi_cuda_load_vec4s<real, held>(x, e, b, i, step, j);
#pragma unroll
                for (int k = 0; k < 4 * held; k++) {
                    beyond = beyond || !(fabs((double)values.row[k / 4].v[k % 4]) <= most);
                }
            }
        }
        if (__syncthreads_or(beyond) && tchi_cuda_thread_number() == 0) {
            atomicCAS(flags + b, (int)TCH_REPORT_OK, (int)TCH_REPORT_OVERFLOW);
        }
    }
}

tch_status tchi_cuda_flag_overflow(void *state, const tch_matrices *x, double most, int32_t *flags)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    tchi_cuda_extent e = {x->rows, x->cols, x->batch};
    if (e.rows == 0 || e.cols == 0 || e.batch == 0) {
        return TCH_OK;
    }
    dim3 block = tchi_cuda_reduce_block(e, THREADS);
    dim3 grid = grid_for(s, e, block);
    auto kernel = x->type == TCH_SCALAR_F64 ? overflow_kernel<double> : overflow_kernel<float>;
    kernel<<<grid, block, 0, s->stream>>>(e, tchi_cuda_operand_of(x), most, flags);
    return tchi_cuda_launched(s, "overflow");
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

template <typename real>
static __device__ inline real at_or_zero(const tchi_cuda_operand &x, const char *matrix, int64_t n, int64_t i,
                                         int64_t j)
{
    return i < n && j < n ? tchi_cuda_load<real>(x.type, matrix, i * x.ld + j, x.stride) : (real)0;
}

/* A tile and its mirror image are both read along rows; the image goes through shared memory to be compared. */
template <typename real>
static __device__ inline void inspect_pair(tally<real> &seen, const tchi_cuda_operand &x, const char *matrix, int64_t n,
                                           tile_pair tile, real image[TILE][TILE + 1])
{
    const int held = TILE * TILE / THREADS;
    int row = (int)threadIdx.y;
    int col = (int)threadIdx.x;
    real here[held];
    real there[held];
#pragma unroll
    for (int k = 0; k < held; k++) {
        int r = row + k * (THREADS / TILE);
        here[k] = at_or_zero<real>(x, matrix, n, tile.row * TILE + r, tile.col * TILE + col);
        there[k] = at_or_zero<real>(x, matrix, n, tile.col * TILE + r, tile.row * TILE + col);
    }
#pragma unroll
    for (int k = 0; k < held; k++) {
        image[row + k * (THREADS / TILE)][col] = there[k];
        look_at(seen, here[k]);
        look_at(seen, tile.row != tile.col ? there[k] : (real)0);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < held; k++) {
        compare(seen, here[k], image[col][row + k * (THREADS / TILE)]);
    }
    __syncthreads();
}

/* Blocks are TILE by THREADS / TILE. Reads every element once. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    inspect_kernel(int64_t n, int64_t batch, tchi_cuda_operand x, double *max_abs, double *nonfinite, double *asymmetry)
{
    __shared__ real image[TILE][TILE + 1];
    int64_t tiles = tchi_cuda_ceil_div(n, TILE);
    for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
        tally<real> seen = {};
        for (int64_t pair = blockIdx.x; pair < tchi_lower_tiles(tiles); pair += gridDim.x) {
            inspect_pair(seen, x, tchi_cuda_at(x, b, 0, 0), n, pair_at(pair), image);
        }
        report(seen, entry_or_null(max_abs, b), entry_or_null(nonfinite, b), entry_or_null(asymmetry, b));
    }
}

#define WIDE_TILE 64
#define WIDE_HELD (WIDE_TILE * WIDE_TILE / 4 / THREADS) /* vectors of a tile that a thread has */

/* Four neighbors, or zeros beyond the edge, which is a multiple of four away. */
static __device__ inline float4 four_or_zero(const float *matrix, int64_t ld, int64_t n, int64_t i, int64_t j)
{
    return i < n && j < n ? *(const float4 *)(matrix + i * ld + j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

static __device__ inline void look_at_four(tally<float> &seen, float4 four)
{
    look_at(seen, four.x);
    look_at(seen, four.y);
    look_at(seen, four.z);
    look_at(seen, four.w);
}

/* As inspect_pair, with four times as much under way in a thread. */
static __device__ inline void inspect_wide_pair(tally<float> &seen, const float *matrix, int64_t ld, int64_t n,
                                                tile_pair tile, float image[WIDE_TILE][WIDE_TILE + 1])
{
    constexpr int step = THREADS / (WIDE_TILE / 4);
    const int row = (int)threadIdx.x / (WIDE_TILE / 4);
    const int col = (int)threadIdx.x % (WIDE_TILE / 4) * 4;
    float4 here[WIDE_HELD], there[WIDE_HELD];
#pragma unroll
    for (int k = 0; k < WIDE_HELD; k++) {
        int64_t r = row + k * step;
        here[k] = four_or_zero(matrix, ld, n, tile.row * WIDE_TILE + r, tile.col * WIDE_TILE + col);
        there[k] = four_or_zero(matrix, ld, n, tile.col * WIDE_TILE + r, tile.row * WIDE_TILE + col);
    }
#pragma unroll
    for (int k = 0; k < WIDE_HELD; k++) {
        float *to = &image[row + k * step][col];
        to[0] = there[k].x;
        to[1] = there[k].y;
        to[2] = there[k].z;
        to[3] = there[k].w;
        look_at_four(seen, here[k]);
        if (tile.row != tile.col) {
            look_at_four(seen, there[k]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < WIDE_HELD; k++) {
        int r = row + k * step;
        compare(seen, here[k].x, image[col][r]);
        compare(seen, here[k].y, image[col + 1][r]);
        compare(seen, here[k].z, image[col + 2][r]);
        compare(seen, here[k].w, image[col + 3][r]);
    }
    __syncthreads();
}

/* The same for rows of aligned vectors of float32. */
static __global__ void __launch_bounds__(THREADS)
    inspect_wide_kernel(int64_t n, int64_t batch, tchi_cuda_operand x, double *max_abs, double *nonfinite,
                        double *asymmetry)
{
    __shared__ float image[WIDE_TILE][WIDE_TILE + 1];
    int64_t tiles = tchi_cuda_ceil_div(n, WIDE_TILE);
    for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
        tally<float> seen = {};
        for (int64_t pair = blockIdx.x; pair < tchi_lower_tiles(tiles); pair += gridDim.x) {
            inspect_wide_pair(seen, (const float *)tchi_cuda_at(x, b, 0, 0), x.ld, n, pair_at(pair), image);
        }
        report(seen, entry_or_null(max_abs, b), entry_or_null(nonfinite, b), entry_or_null(asymmetry, b));
    }
}

static tch_status inspect_wide(tchi_cuda_state *s, const tch_matrices *x, double *max_abs, double *nonfinite,
                               double *asymmetry)
{
    int64_t pairs = tchi_lower_tiles(tchi_cuda_ceil_div(x->rows, WIDE_TILE));
    dim3 grid((unsigned)tchi_min(pairs, share_of(s, x->batch)), 1, tchi_cuda_grid_yz(x->batch));
    inspect_wide_kernel<<<grid, THREADS, 0, s->stream>>>(x->rows, x->batch, tchi_cuda_operand_of(x), max_abs, nonfinite,
                                                         asymmetry);
    return tchi_cuda_launched(s, "inspect");
}

/* max_abs and nonfinite may be NULL. */
static tch_status inspect(tchi_cuda_state *s, const tch_matrices *x, double *max_abs, double *nonfinite,
                          double *asymmetry)
{
    TCHI_CUDA_PASS(tchi_cuda_clear(s, x->batch, max_abs, nonfinite, asymmetry));
    if (x->rows == 0) {
        return TCH_OK;
    }
    if (x->type == TCH_SCALAR_F32 && x->rows % 4 == 0 && tchi_cuda_operand_of(x).wide) {
        return inspect_wide(s, x, max_abs, nonfinite, asymmetry);
    }
    int64_t tiles = tchi_cuda_ceil_div(x->rows, TILE);
    int64_t share = tchi_min(tchi_lower_tiles(tiles), share_of(s, x->batch));
    dim3 grid((unsigned)share, 1, tchi_cuda_grid_yz(x->batch));
    dim3 block(TILE, THREADS / TILE);
    if (x->type == TCH_SCALAR_F64) {
        inspect_kernel<double>
            <<<grid, block, 0, s->stream>>>(x->rows, x->batch, tchi_cuda_operand_of(x), max_abs, nonfinite, asymmetry);
    } else {
        inspect_kernel<float>
            <<<grid, block, 0, s->stream>>>(x->rows, x->batch, tchi_cuda_operand_of(x), max_abs, nonfinite, asymmetry);
    }
    return tchi_cuda_launched(s, "inspect");
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

static tch_status reduce_trace(const tchi_cuda_state *state, const tch_matrices *x, double *out)
{
    tchi_cuda_extent e = {x->rows, x->cols, x->batch};
    trace_kernel<<<tchi_cuda_grid(e.batch), THREADS, 0, state->stream>>>(e, tchi_cuda_operand_of(x), out);
    return tchi_cuda_launched(state, "trace");
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
        return reduce_trace(s, x, out);
    case TCH_REDUCE_MAX_ABS:
        return tchi_cuda_scan(s, x, out, NULL);
    case TCH_REDUCE_NONFINITE:
        return tchi_cuda_scan(s, x, NULL, out);
    case TCH_REDUCE_INSPECT:
        return inspect(s, x, out, out + x->batch, out + 2 * x->batch);
    default:
        return inspect(s, x, NULL, NULL, out);
    }
}
