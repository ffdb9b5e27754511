/* Reductions: one number per matrix. Maxima and counts do not depend on the order they are taken in, so all blocks of
 * the device share a matrix and meet in atomic operations on the result. The sum of squares does: a matrix is always
 * cut into the same parts, summed by one block each or in turn, and added up in their order by one thread, so that the
 * number depends neither on the batch nor on chance. Blocks of one matrix meet in a cluster, for want of scratch. */
#include "cuda.h"
#include "elements.cuh"
#include "ptx.cuh"

#define THREADS 256       /* of a block, but for large sums of squares */
#define BLOCKS_PER_UNIT 8 /* blocks of 256 threads that fill a multiprocessor */
#define TILE 32

typedef struct extent {
    int64_t rows, cols, batch;
} extent;

/* Blocks that share one matrix, so that the batch fills the device about once. */
static int64_t share_of(const tchi_cuda_state *state, int64_t batch)
{
    int64_t share = (int64_t)state->device.processors * BLOCKS_PER_UNIT / batch;
    return share > 1 ? share : 1;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A block of whole warps, as wide as rows of fours need. */
static dim3 block_of(const extent &e, int64_t threads)
{
    dim3 block = tchi_cuda_block_for(tchi_cuda_ceil_div(e.cols, 4), e.rows, threads);
    block.y = (unsigned)threads / block.x;
    return block;
}

static __device__ inline int thread_number()
{
    return (int)(threadIdx.y * blockDim.x + threadIdx.x);
}

/* --- meeting in the result ---------------------------------------------------------------------------------------- */

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

static tch_status clear(const tchi_cuda_state *state, int64_t batch, double *a, double *b, double *c)
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
    int thread = thread_number();
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

static __device__ inline double *entry(double *array, int64_t b)
{
    return array != NULL ? array + b : NULL;
}

/* --- largest entry, entries that are not finite ------------------------------------------------------------------- */

/* Fours of rows i, i + step, ... from column j on; zeros outside the matrix. */
template <typename real, int count> struct column_of_fours {
    tchi_cuda_four<real> row[count];
};

template <typename real, int count>
static __device__ inline column_of_fours<real, count> load_rows(const tchi_cuda_operand &x, const extent &e, int64_t b,
                                                                int64_t i, int64_t step, int64_t j)
{
    column_of_fours<real, count> values;
    int wanted = e.cols - j < 4 ? (int)(e.cols - j) : 4;
    const char *from = tchi_cuda_at(x, b, i, j);
    int64_t pitch = step * x.ld * tchi_cuda_size(x.type);
#pragma unroll
    for (int k = 0; k < count; k++) {
        values.row[k] = tchi_cuda_load_from<real>(x, from + k * pitch, i + k * step < e.rows ? wanted : 0);
    }
    return values;
}

/* Reads every element once: grid columns by rows by matrices, each walked on by the grid's size. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    scan_kernel(extent e, tchi_cuda_operand x, double *max_abs, double *nonfinite)
{
    const int held = 2;
    int64_t step = (int64_t)gridDim.y * blockDim.y;
    for (int64_t b = blockIdx.z; b < e.batch; b += gridDim.z) {
        tally<real> seen = {};
        for (int64_t i = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; i < e.rows; i += held * step) {
            for (int64_t j = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4; j < e.cols;
                 j += (int64_t)gridDim.x * blockDim.x * 4) {
                column_of_fours<real, held> values = load_rows<real, held>(x, e, b, i, step, j);
#pragma unroll
                for (int k = 0; k < 4 * held; k++) {
                    look_at(seen, values.row[k / 4].v[k % 4]);
                }
            }
        }
        report(seen, entry(max_abs, b), entry(nonfinite, b), (double *)NULL);
    }
}

static tch_status scan(const tchi_cuda_state *state, const tch_matrices *x, double *max_abs, double *nonfinite)
{
    extent e = {x->rows, x->cols, x->batch};
    TCHI_CUDA_PASS(clear(state, e.batch, max_abs, nonfinite, NULL));
    if (e.rows == 0 || e.cols == 0) {
        return TCH_OK;
    }
    int64_t share = share_of(state, e.batch);
    dim3 block = block_of(e, THREADS);
    int64_t across = least(tchi_cuda_ceil_div(e.cols, (int64_t)block.x * 4), share);
    int64_t down = least(tchi_cuda_ceil_div(e.rows, block.y), tchi_cuda_ceil_div(share, across));
    dim3 grid((unsigned)across, (unsigned)down, tchi_cuda_grid_yz(e.batch));
    if (x->type == TCH_SCALAR_F64) {
        scan_kernel<double><<<grid, block, 0, state->stream>>>(e, tchi_cuda_operand_of(x), max_abs, nonfinite);
    } else {
        scan_kernel<float><<<grid, block, 0, state->stream>>>(e, tchi_cuda_operand_of(x), max_abs, nonfinite);
    }
    return tchi_cuda_launched(state, "scan");
}

/* --- asymmetry, and all three at once ----------------------------------------------------------------------------- */

/* A tile on or below the diagonal. Pairs are numbered row by row: 0 is (0, 0), 1 is (1, 0), 2 is (1, 1), ... */
typedef struct tile_pair {
    int64_t row, col;
} tile_pair;

static __device__ inline tile_pair pair_at(int64_t number)
{
    int64_t row = (int64_t)((sqrt(8.0 * (double)number + 1.0) - 1.0) / 2.0);
    while (row * (row + 1) / 2 > number) {
        row--;
    }
    while ((row + 1) * (row + 2) / 2 <= number) {
        row++;
    }
    return {row, number - row * (row + 1) / 2};
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
        for (int64_t pair = blockIdx.x; pair < tiles * (tiles + 1) / 2; pair += gridDim.x) {
            inspect_pair(seen, x, tchi_cuda_at(x, b, 0, 0), n, pair_at(pair), image);
        }
        report(seen, entry(max_abs, b), entry(nonfinite, b), entry(asymmetry, b));
    }
}

tch_status tchi_cuda_inspect(void *state, const tch_matrices *x, double *max_abs, double *nonfinite, double *asymmetry)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    if (x->batch == 0) {
        return TCH_OK;
    }
    TCHI_CUDA_PASS(clear(s, x->batch, max_abs, nonfinite, asymmetry));
    if (x->rows == 0) {
        return TCH_OK;
    }
    int64_t tiles = tchi_cuda_ceil_div(x->rows, TILE);
    int64_t share = least(tiles * (tiles + 1) / 2, share_of(s, x->batch));
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

/* --- trace -------------------------------------------------------------------------------------------------------- */

/* A block per matrix. */
static __global__ void __launch_bounds__(THREADS) trace_kernel(extent e, tchi_cuda_operand x, double *out)
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

static tch_status trace(const tchi_cuda_state *state, const tch_matrices *x, double *out)
{
    extent e = {x->rows, x->cols, x->batch};
    trace_kernel<<<tchi_cuda_grid(e.batch), THREADS, 0, state->stream>>>(e, tchi_cuda_operand_of(x), out);
    return tchi_cuda_launched(state, "trace");
}

/* --- Frobenius norm ----------------------------------------------------------------------------------------------- */

/* From this many elements on a matrix is cut into 16 parts for blocks of 1024 threads: fewer are not worth the meeting.
 * A part is every `across`-th strip of columns and every `down`-th strip of rows, across times down being `parts`. */
#define LARGE 65536
#define LARGE_THREADS 1024
#define MOST_PARTS 16

typedef struct partition {
    int32_t parts, across, down;
} partition;

/* Sums over one part. 64 bytes are under way in a thread at once, which a multiprocessor with 1024 of them needs to draw
 * its share from memory: 64 KB in the 700 ns that a load takes. */
template <typename real>
static __device__ inline double sum_part(const extent &e, const tchi_cuda_operand &x, int64_t b, const partition &cut,
                                         int part, double factor)
{
    const int held = 16 / (int)sizeof(real);
    int64_t row = (int64_t)(part % cut.down) * blockDim.y + threadIdx.y;
    int64_t col = ((int64_t)(part / cut.down) * blockDim.x + threadIdx.x) * 4;
    int64_t step = (int64_t)cut.down * blockDim.y;
    double sum = 0;
    for (int64_t i = row; i < e.rows; i += held * step) {
        for (int64_t j = col; j < e.cols; j += (int64_t)cut.across * blockDim.x * 4) {
            column_of_fours<real, held> values = load_rows<real, held>(x, e, b, i, step, j);
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

/* The norm of a matrix whose largest entry is `largest`, from the sum of squares of entries divided by `unit`. */
static __device__ inline double norm_of(double largest, double unit, double sum)
{
    return largest == 0 || isinf(largest) ? largest : unit * sqrt(sum);
}

/* A cluster per matrix, its blocks taking parts in turn. Squares of float64 entries beyond about 1e150 overflow and of
 * those below 1e-150 vanish, so these are divided by the largest entry, which is in `out` beforehand; entries of other
 * types cannot reach that far in float64 sums. */
template <typename real, int threads>
static __global__ void __launch_bounds__(threads, LARGE_THREADS / threads)
    frobenius_kernel(extent e, tchi_cuda_operand x, partition cut, double *out)
{
    __shared__ double sums[MOST_PARTS];
    __shared__ double shared[32];
    int rank = tchi_cluster_rank();
    int size = tchi_cluster_size();
    const bool scaled = sizeof(real) == sizeof(double);
    for (int64_t b = blockIdx.x / size; b < e.batch; b += gridDim.x / size) {
        double largest = scaled ? out[b] : 1.0;
        double unit = scaled ? fmax(largest, 0x1p-1022) : 1.0;
        for (int part = rank; part < cut.parts; part += size) {
            double sum = sum_part<real>(e, x, b, cut, part, 1.0 / unit);
            sum = tchi_cuda_block_sum(sum, thread_number(), threads, shared);
            if (thread_number() == 0) {
                sums[part] = sum;
            }
        }
        tchi_cluster_sync();
        if (rank == 0 && thread_number() == 0) {
            double sum = 0;
            for (int part = 0; part < cut.parts; part++) {
                sum += *(const double *)tchi_cluster_map(&sums[part], part % size);
            }
            out[b] = norm_of(largest, unit, sum);
        }
        tchi_cluster_sync();
    }
}

/* Blocks that share a matrix: as many as there are parts while the batch leaves multiprocessors idle. Clusters of 16
 * have to be asked for, and are not to be had on every device. */
template <typename real> static int cluster_for(const tchi_cuda_state *state, int64_t batch, cudaLaunchConfig_t *config)
{
    auto kernel = frobenius_kernel<real, LARGE_THREADS>;
    int clusters = 0;
    if (state->device.major < 9 || batch >= state->device.processors) {
        return 1;
    }
    if (batch * 8 >= state->device.processors) {
        return 8;
    }
    config->attrs[0].val.clusterDim.x = MOST_PARTS;
    config->gridDim = dim3(MOST_PARTS);
    bool possible = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
                    cudaOccupancyMaxActiveClusters(&clusters, kernel, config) == cudaSuccess && clusters > 0;
    if (!possible) {
        cudaGetLastError();
    }
    return possible ? MOST_PARTS : 8;
}

template <typename real>
static tch_status launch_large(const tchi_cuda_state *state, const extent &e, const tch_matrices *x, double *out)
{
    partition cut = e.rows < MOST_PARTS ? partition{MOST_PARTS, MOST_PARTS, 1} : partition{MOST_PARTS, 1, MOST_PARTS};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = block_of(e, LARGE_THREADS);
    config.stream = state->stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int size = cluster_for<real>(state, e.batch, &config);
    attribute.val.clusterDim.x = (unsigned)size;
    config.numAttrs = size > 1 ? 1 : 0;
    config.gridDim = dim3(size > 1 ? (unsigned)(e.batch * size) : tchi_cuda_grid(e.batch));
    TCHI_CUDA_TRY(
        cudaLaunchKernelEx(&config, frobenius_kernel<real, LARGE_THREADS>, e, tchi_cuda_operand_of(x), cut, out),
        "frobenius");
    return tchi_cuda_launched(state, "frobenius");
}

template <typename real>
static tch_status launch_frobenius(const tchi_cuda_state *state, const tch_matrices *x, double *out)
{
    extent e = {x->rows, x->cols, x->batch};
    if (e.rows * e.cols >= LARGE) {
        return launch_large<real>(state, e, x, out);
    }
    partition whole = {1, 1, 1};
    frobenius_kernel<real, THREADS>
        <<<tchi_cuda_grid(e.batch), block_of(e, THREADS), 0, state->stream>>>(e, tchi_cuda_operand_of(x), whole, out);
    return tchi_cuda_launched(state, "frobenius");
}

static tch_status frobenius(const tchi_cuda_state *state, const tch_matrices *x, double *out)
{
    if (x->rows == 0 || x->cols == 0) {
        return clear(state, x->batch, out, NULL, NULL);
    }
    if (x->type != TCH_SCALAR_F64) {
        return launch_frobenius<float>(state, x, out);
    }
    TCHI_CUDA_PASS(scan(state, x, out, NULL));
    return launch_frobenius<double>(state, x, out);
}

/* --- the operation ------------------------------------------------------------------------------------------------ */

tch_status tchi_cuda_reduce(void *state, tch_reduction kind, const tch_matrices *x, double *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    if (x->batch == 0) {
        return TCH_OK;
    }
    switch (kind) {
    case TCH_REDUCE_FROBENIUS:
        return frobenius(s, x, out);
    case TCH_REDUCE_TRACE:
        return trace(s, x, out);
    case TCH_REDUCE_MAX_ABS:
        return scan(s, x, out, NULL);
    case TCH_REDUCE_NONFINITE:
        return scan(s, x, NULL, out);
    default:
        return tchi_cuda_inspect(s, x, NULL, NULL, out);
    }
}
