/* Inner products of the blocks of two matrices, and of the pairs of two batches. Both are float64 sums over chunks
 * determined by sizes alone; a block of threads, or a few lanes for short sums, handles a chunk, and a second kernel
 * adds the chunks in order.
 *
 *     for (i = 0; i < down; i++) {                            // block_dots: blocks of height by width
 *         for (j = 0; j < across; j++) {
 *             sum = sum over r and c of x[i * height + r][j * width + c] * y[i * height + r][j * width + c];
 *             out[i][j] = beta * out[i][j] + scale * sum;
 *         }
 *     }
 *     for (b = 0; b < batch; b++) {                           // pair_dots
 *         out[b / groups] += scale * sum over i and j of x[b][i][j] * y[b][i][j];
 *     } */
#include "backends/cuda/device/batch_walk.cuh"
#include "position_sums.cuh"

#define THREADS 256
#define CHUNK 16384 /* elements of a chunk, about: 64 for each thread */
#define FEW 1024    /* elements of a block that lanes of one warp sum */
#define HELD 2      /* vec4s of each operand in flight in a thread */

/* Rows of a chunk of a matrix. */
static int64_t chunk_rows(int64_t rows, int64_t cols)
{
    int64_t rows_of_chunk = CHUNK / (cols > 0 ? cols : 1);
    rows_of_chunk = rows_of_chunk > 1 ? rows_of_chunk : 1;
    return rows_of_chunk < rows ? rows_of_chunk : rows;
}

/* The part of matrix b from (i, j) on as an operand. */
static __device__ inline tchi_cuda_operand part_of(const tchi_cuda_operand &m, int64_t b, int64_t i, int64_t j)
{
    return {tchi_cuda_at(m, b, i, j), m.type, m.wide && j % 4 == 0, m.ld, m.stride};
}

/* The sum over a part, by all threads of a block. */
template <typename real>
static __device__ inline double dot_of_parts(const tchi_cuda_operand &x, const tchi_cuda_operand &y, int64_t rows,
                                             int64_t cols, double *shared)
{
    const tchi_cuda_extent e = {rows, cols, 1};
    const int64_t step = blockDim.y;
    double sum = 0;
    for (int64_t i = threadIdx.y; i < rows; i += HELD * step) {
        for (int64_t j = (int64_t)threadIdx.x * 4; j < cols; j += (int64_t)blockDim.x * 4) {
            tchi_cuda_rows_of_vec4s<real, HELD> a = tchi_cuda_load_vec4s<real, HELD>(x, e, 0, i, step, j);
            tchi_cuda_rows_of_vec4s<real, HELD> b = tchi_cuda_load_vec4s<real, HELD>(y, e, 0, i, step, j);
#pragma unroll
            for (int k = 0; k < 4 * HELD; k++) {
                sum = fma((double)a.row[k / 4].v[k % 4], (double)b.row[k / 4].v[k % 4], sum);
            }
        }
    }
    return tchi_cuda_block_sum(sum, tchi_cuda_thread_number(), (int)(blockDim.x * blockDim.y), shared);
}

/* Block size for a part, in whole warps. */
static dim3 threads_for(int64_t rows, int64_t cols)
{
    int64_t threads = THREADS;
    while (threads > 32 && threads * 8 >= rows * cols) {
        threads /= 2;
    }
    return tchi_cuda_reduce_block({rows, cols, 1}, threads);
}

/* --- blocks of two matrices -------------------------------------------------------------------------------------- */

typedef struct block_call {
    tchi_cuda_operand x, y;
    tchi_cuda_sum_target<1> target;
    int64_t down, across;  /* blocks: rows and columns of out */
    int64_t height, width; /* of a block */
    int64_t chunk, chunks; /* rows of one, and chunks of a block */
} block_call;

static __device__ inline void put_block(const block_call &c, int64_t block, double sum)
{
    tchi_cuda_put_sum(c.target, 0, block / c.across, block % c.across, sum);
}

/* The sum over a small block by `lanes` adjacent lanes, a power of two; this is `lane`. */
template <typename real>
static __device__ inline double dot_by_lanes(const block_call &c, int64_t block, int lane, int lanes)
{
    const int64_t i = block / c.across * c.height;
    const int64_t j = block % c.across * c.width;
    double sum = 0;
    if (c.width == 0) {
        return sum;
    }
    int64_t row = lane / c.width;
    int64_t col = lane - row * c.width;
    const int64_t down = lanes / c.width;
    const int64_t along = lanes - down * c.width;
    for (int64_t e = lane; e < c.height * c.width; e += lanes) {
        double a = (double)tchi_cuda_load<real>(c.x.type, tchi_cuda_at(c.x, 0, i + row, j + col), 0, 0);
        double b = (double)tchi_cuda_load<real>(c.y.type, tchi_cuda_at(c.y, 0, i + row, j + col), 0, 0);
        sum = fma(a, b, sum);
        bool over = col + along >= c.width;
        row += down + (over ? 1 : 0);
        col += along - (over ? c.width : 0);
    }
    return sum;
}

/* x, y (down height, across width), out (down, across). Memory: x and y once. Compute: a product and a sum per element.
 * Neighboring groups of lanes have neighboring blocks. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    small_block_dots_kernel(const __grid_constant__ block_call c, int lanes)
{
    const int64_t total = c.down * c.across;
    const int64_t step = (int64_t)gridDim.x * THREADS / lanes;
    const int lane = (int)threadIdx.x % lanes;
    const int64_t first = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / lanes;
    const int64_t warp_first = ((int64_t)blockIdx.x * THREADS + threadIdx.x / 32 * 32) / lanes;
    for (int64_t n = 0; warp_first + n < total; n += step) {
        int64_t block = first + n;
        double sum = block < total ? dot_by_lanes<real>(c, block, lane, lanes) : 0.0;
        for (int distance = lanes / 2; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
        }
        if (lane == 0 && block < total) {
            put_block(c, block, sum);
        }
    }
}

/* The same with a block of threads per chunk of a block. Blocks are those of two matrices or, with `pairs`, whole
 * matrices of two batches; sums go to `partial` if given, else to `sums`. */
template <typename real, bool pairs>
static __global__ void __launch_bounds__(THREADS, 3)
    block_dots_kernel(const __grid_constant__ block_call c, double *partial, double *sums)
{
    __shared__ double shared[32];
    for (int64_t n = blockIdx.x; n < c.down * c.across * c.chunks; n += gridDim.x) {
        int64_t block = n / c.chunks;
        int64_t first = (n - block * c.chunks) * c.chunk;
        int64_t b = pairs ? block : 0;
        int64_t i = pairs ? first : block / c.across * c.height + first;
        int64_t j = pairs ? 0 : block % c.across * c.width;
        int64_t rows = c.height - first < c.chunk ? c.height - first : c.chunk;
        double sum = dot_of_parts<real>(part_of(c.x, b, i, j), part_of(c.y, b, i, j), rows, c.width, shared);
        if (tchi_cuda_thread_number() != 0) {
            continue;
        }
        if (partial != nullptr) {
            partial[n] = sum;
        } else if (pairs) {
            sums[n] += c.target.scale * sum;
        } else {
            put_block(c, block, sum);
        }
    }
}

/* A warp per block. */
static __global__ void __launch_bounds__(THREADS)
    add_block_chunks_kernel(const __grid_constant__ block_call c, const double *partial)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    for (int64_t block = warp; block < c.down * c.across; block += (int64_t)gridDim.x * (THREADS / 32)) {
        double sum = 0;
        for (int64_t k = lane; k < c.chunks; k += 32) {
            sum += partial[block * c.chunks + k];
        }
        sum = tchi_cuda_warp_sum(sum);
        if (lane == 0) {
            put_block(c, block, sum);
        }
    }
}

/* With several chunks per block each has at least CHUNK / 2 elements; including a shorter last one there are at most
 * four per CHUNK elements. */
int64_t tchi_cuda_block_dots_scratch(int64_t rows, int64_t cols)
{
    return (rows * cols / (CHUNK / 4) + 1) * (int64_t)sizeof(double);
}

template <typename real>
static tch_status run_blocks(const tchi_cuda_state *state, const block_call &c, double *partial)
{
    int64_t total = c.down * c.across;
    if (c.height * c.width <= FEW) {
        int lanes = 1;
        while (lanes < 32 && lanes < c.height * c.width) {
            lanes *= 2;
        }
        return tchi_cuda_launch(state, "small_block_dots", small_block_dots_kernel<real>,
                                tchi_cuda_grid(tchi_cuda_ceil_div(total * lanes, THREADS)), THREADS, c, lanes);
    }
    TCHI_TRY(tchi_cuda_launch(state, "block_dots", block_dots_kernel<real, false>, tchi_cuda_grid(total * c.chunks),
                              threads_for(c.chunk, c.width), c, c.chunks > 1 ? partial : NULL, NULL));
    return c.chunks == 1
               ? TCH_OK
               : tchi_cuda_launch(state, "add_block_chunks", add_block_chunks_kernel,
                                  tchi_cuda_grid(tchi_cuda_ceil_div(total, THREADS / 32)), THREADS, c, partial);
}

tch_status tchi_cuda_block_dots(void *state, const tch_matrices *x, const tch_matrices *y, int64_t height,
                                int64_t width, double scale, double beta, const tch_matrices *out, void *scratch)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    const int64_t chunk = chunk_rows(height, width), chunks = chunk > 0 ? tchi_cuda_ceil_div(height, chunk) : 1;
    block_call c = {tchi_cuda_operand_of(x),
                    tchi_cuda_operand_of(y),
                    {{tchi_cuda_operand_of(out)}, scale, beta},
                    out->rows,
                    out->cols,
                    height,
                    width,
                    chunk,
                    chunks};
    return x->type == TCH_SCALAR_F64 ? run_blocks<double>(s, c, (double *)scratch)
                                     : run_blocks<float>(s, c, (double *)scratch);
}

/* --- pairs of two batches ---------------------------------------------------------------------------------------- */

int64_t tchi_cuda_pair_dots_scratch(int64_t rows, int64_t cols, int64_t batch)
{
    return rows > 0 ? batch * tchi_cuda_ceil_div(rows, chunk_rows(rows, cols)) * (int64_t)sizeof(double) : 0;
}

tch_status tchi_cuda_pair_dots(void *state, const tch_matrices *x, const tch_matrices *y, int64_t groups, double scale,
                               double *out, void *scratch)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    if (tchi_cuda_is_empty(tchi_cuda_extent_of(x))) {
        return TCH_OK;
    }
    const int64_t height = chunk_rows(x->rows, x->cols), chunks = tchi_cuda_ceil_div(x->rows, height);
    double *partial = groups * chunks == 1 ? NULL : (double *)scratch;
    block_call c = {tchi_cuda_operand_of(x),
                    tchi_cuda_operand_of(y),
                    {{}, scale, 0.0},
                    x->batch,
                    1,
                    x->rows,
                    x->cols,
                    height,
                    chunks};
    auto kernel = x->type == TCH_SCALAR_F64 || y->type == TCH_SCALAR_F64 ? block_dots_kernel<double, true>
                                                                         : block_dots_kernel<float, true>;
    TCHI_TRY(tchi_cuda_launch(s, "pair_dots", kernel, tchi_cuda_grid(x->batch * chunks), threads_for(height, x->cols),
                              c, partial, out));
    return partial == NULL ? TCH_OK
                           : tchi_cuda_add_partials(s, x->batch / groups, groups * chunks, partial, scale, out);
}
