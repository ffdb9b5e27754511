/* Eigenbasis tracking: dot products of rows, rows split into two float16, sorting and permutation. Sums are in float64
 * in an order that depends on the shape alone.
 *
 *     w[i] = pow(sum over j of x[i][j] * y[i][j], exponent);              // row_dots
 *     x[i] /= |x[i]|;                                                     // split_rows, if rows are to be normalized
 *     high[i][j] = half(x[i][j] * scale);  low[i][j] = half(x[i][j] * scale - high[i][j]);
 *     order[number of k with w[k] > w[i], or w[k] == w[i] and k < i] = i; // descending
 *     out[i][j] = x[rows[i]][cols[j]];                                    // permute */
#include "backends/cuda/device/batch_walk.cuh"

#define WARP 32

/* Blocks of 256 threads per multiprocessor: with four the compiler would spill. */
#define BLOCKS 3

/* --- dot products of rows ---------------------------------------------------------------------------------------- */

#define DOTS_WARPS 8 /* per block, one row each */

/* The sum over row i of X Y, in every lane. */
template <typename real>
static __device__ double dot_row(const tchi_cuda_extent &e, const tchi_cuda_operand &x, const tchi_cuda_operand &y,
                                 int64_t b, int64_t i)
{
    double sum = 0.0;
#pragma unroll 4
    for (int64_t j = 4 * (threadIdx.x % WARP); j < e.cols; j += 4 * WARP) {
        int count = e.cols - j < 4 ? (int)(e.cols - j) : 4;
        tchi_cuda_vec4<real> left = tchi_cuda_load_vec4<real>(x, b, i, j, count);
        tchi_cuda_vec4<real> right = tchi_cuda_load_vec4<real>(y, b, i, j, count);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sum += (double)left.v[k] * (double)right.v[k];
        }
    }
    return tchi_cuda_warp_sum(sum);
}

/* w(i) = (sum over j of X(i, j) Y(i, j))^exponent, X and Y (batch, rows, cols), w (batch, 1, rows); a warp per row.
 * Memory: X and Y once. Compute: two operations per element. */
template <typename real>
static __global__ void __launch_bounds__(DOTS_WARPS *WARP, BLOCKS)
    row_dots_kernel(tchi_cuda_extent e, tchi_cuda_operand x, tchi_cuda_operand y, double exponent, tchi_cuda_operand w)
{
    int64_t first = (int64_t)blockIdx.x * DOTS_WARPS + threadIdx.x / WARP;
    for (int64_t r = first; r < e.batch * e.rows; r += (int64_t)gridDim.x * DOTS_WARPS) {
        int64_t b = r / e.rows;
        int64_t i = r % e.rows;
        double sum = dot_row<real>(e, x, y, b, i);
        if (threadIdx.x % WARP == 0) {
            double value = exponent == 1.0 ? sum : sum > 0.0 ? pow(sum, exponent) : 0.0;
            tchi_cuda_store<double>(w.type, tchi_cuda_at(w, b, 0, i), 0, w.stride, value);
        }
    }
}

tch_status tchi_cuda_row_dots(void *state, const tch_matrices *x, const tch_matrices *y, double exponent,
                              const tch_matrices *w)
{
    tchi_cuda_extent e = tchi_cuda_extent_of(x);
    unsigned grid = tchi_cuda_grid(tchi_cuda_ceil_div(e.rows * e.batch, DOTS_WARPS));
    auto kernel = x->type == TCH_SCALAR_F64 ? row_dots_kernel<double> : row_dots_kernel<float>;
    return tchi_cuda_launch(state, "row_dots_kernel", kernel, grid, DOTS_WARPS * WARP, e, tchi_cuda_operand_of(x),
                            tchi_cuda_operand_of(y), exponent, tchi_cuda_operand_of(w));
}

/* --- rows as sums of two float16 --------------------------------------------------------------------------------- */

#define SPLIT_THREADS 256 /* of a block, which processes a row, or several if they are not normalized */
#define HELD 4            /* vectors that a thread keeps in registers, of a row or of as many rows */
#define SPLIT_BLOCKS 5    /* per multiprocessor: enough are loading while others wait for a sum */

/* Source and outputs of a split. Kernel parameters are separate: as one struct they took 20 more registers. */
typedef struct split_ends {
    const tchi_cuda_extent &e;
    const tchi_cuda_operand &x, &rows; /* `rows` if they are normalized, otherwise X */
    const tchi_cuda_operand &high, &low;
} split_ends;

/* A row of them; `wide` if all accesses are vectors of four. */
template <typename real> struct split_row {
    const real *x;
    float *to;
    __half *high, *low;
    int cols;
    bool wide;
};

template <typename real> static __device__ __forceinline__ split_row<real> row_of(const split_ends &p, int64_t r)
{
    int64_t b = r / p.e.rows;
    int64_t i = r % p.e.rows;
    return {(const real *)tchi_cuda_at(p.x, b, i, 0),
            (float *)tchi_cuda_at(p.rows, b, i, 0),
            (__half *)tchi_cuda_at(p.high, b, i, 0),
            (__half *)tchi_cuda_at(p.low, b, i, 0),
            (int)p.e.cols,
            p.x.wide && p.rows.wide && p.high.wide && p.low.wide};
}

/* Up to four numbers from column j on, zero-padded. */
template <typename real> static __device__ __forceinline__ float4 load_four(const split_row<real> &row, int j)
{
    const tch_scalar type = sizeof(real) == sizeof(double) ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
    if (row.wide && j + 4 <= row.cols) {
        tchi_cuda_vec4<float> four = tchi_cuda_load_wide<float>(type, row.x, j, 0);
        return make_float4(four.v[0], four.v[1], four.v[2], four.v[3]);
    }
    return make_float4(j < row.cols ? (float)row.x[j] : 0.0f, j + 1 < row.cols ? (float)row.x[j + 1] : 0.0f,
                       j + 2 < row.cols ? (float)row.x[j + 2] : 0.0f, j + 3 < row.cols ? (float)row.x[j + 3] : 0.0f);
}

struct __align__(8) fp16x4
{
    __half v[4];
};

/* Four numbers, split, or only their high parts. */
template <bool both, typename real>
static __device__ __forceinline__ void write_four(const split_row<real> &row, int j, float4 four, float scale)
{
    const float v[4] = {four.x, four.y, four.z, four.w};
    fp16x4 high;
    fp16x4 low;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        high.v[k] = __float2half_rn(v[k] * scale);
        low.v[k] = __float2half_rn(tchi_cuda_left_by(high.v[k], v[k] * scale));
    }
    if (row.wide && j + 4 <= row.cols) {
        *(fp16x4 *)(row.high + j) = high;
        if (both) {
            *(fp16x4 *)(row.low + j) = low;
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (j + k < row.cols) {
            row.high[j + k] = high.v[k];
            if (both) {
                row.low[j + k] = low.v[k];
            }
        }
    }
}

template <typename real>
static __device__ __forceinline__ void write_back(const split_row<real> &row, int j, float4 four)
{
    if (row.wide && j + 4 <= row.cols) {
        *(float4 *)(row.to + j) = four;
        return;
    }
    const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (j + k < row.cols) {
            row.to[j + k] = v[k];
        }
    }
}

static __device__ __forceinline__ double square_of(float4 f)
{
    return (double)f.x * (double)f.x + (double)f.y * (double)f.y + (double)f.z * (double)f.z +
           (double)f.w * (double)f.w;
}

/* A number times `inverse`, given as a sum of two floats, rounded (nearly) once: float64 would need two conversions
 * each. */
static __device__ __forceinline__ float4 scale_four(float4 f, float2 inverse)
{
    return make_float4(fmaf(f.x, inverse.x, f.x * inverse.y), fmaf(f.y, inverse.x, f.y * inverse.y),
                       fmaf(f.z, inverse.x, f.z * inverse.y), fmaf(f.w, inverse.x, f.w * inverse.y));
}

static __device__ __forceinline__ float2 as_sum(double number)
{
    float high = (float)number;
    return make_float2(high, (float)(number - (double)high));
}

/* X, rows, high and low (batch, rows, cols); a block per row, which keeps the start of the row and rereads the rest, if
 * any. Memory: X, 4 bytes per normalized number, and 4 for both float16. */
template <typename real, bool both>
static __global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS)
    split_normalized_kernel(tchi_cuda_extent e, tchi_cuda_operand x, tchi_cuda_operand rows, float scale,
                            tchi_cuda_operand high, tchi_cuda_operand low, tch_condition done)
{
    __shared__ double shared[WARP];
    constexpr int step = 4 * SPLIT_THREADS;
    for (int64_t r = blockIdx.x; r < e.batch * e.rows; r += gridDim.x) {
        if (done.of != NULL && done.of[r / e.rows] <= done.most) {
            continue;
        }
        split_row<real> row = row_of<real>({e, x, rows, high, low}, r);
        int first = 4 * (int)threadIdx.x;
        float4 held[HELD];
        double square = 0.0;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            held[k] = load_four(row, first + k * step);
        }
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            square += square_of(held[k]);
        }
        for (int j = first + HELD * step; j < row.cols; j += step) {
            square += square_of(load_four(row, j));
        }
        square = tchi_cuda_block_sum(square, (int)threadIdx.x, SPLIT_THREADS, shared);
        float2 inverse = as_sum(square == 0.0 ? 0.0 : 1.0 / sqrt(square));
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            float4 four = scale_four(held[k], inverse);
            write_back(row, first + k * step, four);
            write_four<both>(row, first + k * step, four, scale);
        }
        for (int j = first + HELD * step; j < row.cols; j += step) {
            float4 four = scale_four(load_four(row, j), inverse);
            write_back(row, j, four);
            write_four<both>(row, j, four, scale);
        }
    }
}

/* (row + shift e_diagonal) / bound: four numbers from column j on. */
static __device__ __forceinline__ float4 changed(float4 f, float shift, double bound, int diagonal, int j)
{
    int at = diagonal - j;
    f.x += at == 0 ? shift : 0.0f;
    f.y += at == 1 ? shift : 0.0f;
    f.z += at == 2 ? shift : 0.0f;
    f.w += at == 3 ? shift : 0.0f;
    return scale_four(f, as_sum(1.0 / bound));
}

/* The same for X itself, or for (X + shift I) / bound; a block per HELD rows, all loaded before the first is used: a
 * single row of 1024 would be one load per thread. Memory: X and the float16 parts once. */
template <typename real, bool moved, bool both>
static __global__ void __launch_bounds__(SPLIT_THREADS)
    split_plain_kernel(tchi_cuda_extent e, tchi_cuda_operand x, float scale, tchi_cuda_operand high,
                       tchi_cuda_operand low, const double *shift, const double *bound)
{
    const int64_t rows = e.batch * e.rows;
    for (int64_t first = (int64_t)blockIdx.x * HELD; first < rows; first += (int64_t)gridDim.x * HELD) {
        split_row<real> row[HELD];
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            row[k] = row_of<real>({e, x, x, high, low}, first + k < rows ? first + k : first);
        }
        for (int j = 4 * (int)threadIdx.x; j < (int)e.cols; j += 4 * SPLIT_THREADS) {
            float4 held[HELD];
#pragma unroll
            for (int k = 0; k < HELD; k++) {
                held[k] = load_four(row[k], j);
            }
#pragma unroll
            for (int k = 0; k < HELD; k++) {
                if (moved && first + k < rows) {
                    const int64_t b = (first + k) / e.rows;
                    held[k] = changed(held[k], (float)shift[b], bound[b], (int)((first + k) % e.rows), j);
                }
                if (first + k < rows) {
                    write_four<both>(row[k], j, held[k], scale);
                }
            }
        }
    }
}

template <typename real> static tch_status split_rows(tchi_cuda_state *s, const tch_rows_to_split *p)
{
    const tchi_cuda_extent e = tchi_cuda_extent_of(p->x);
    const tchi_cuda_operand x = tchi_cuda_operand_of(p->x), high = tchi_cuda_operand_of(&p->out->high),
                            low = tchi_cuda_operand_of(&p->out->low);
    const float scale = (float)p->out->scale;
    const bool both = p->out->low.data != NULL;
    if (p->rows != NULL) {
        auto kernel = both ? split_normalized_kernel<real, true> : split_normalized_kernel<real, false>;
        return tchi_cuda_launch(s, "split_normalized_kernel", kernel, tchi_cuda_grid(e.rows * e.batch), SPLIT_THREADS,
                                e, x, tchi_cuda_operand_of(p->rows), scale, high, low, p->done);
    }
    auto moved = both ? split_plain_kernel<real, true, true> : split_plain_kernel<real, true, false>;
    auto plain = both ? split_plain_kernel<real, false, true> : split_plain_kernel<real, false, false>;
    return tchi_cuda_launch(s, "split_plain_kernel", p->bound != NULL ? moved : plain,
                            tchi_cuda_grid(tchi_cuda_ceil_div(e.rows * e.batch, HELD)), SPLIT_THREADS, e, x, scale,
                            high, low, p->shift, p->bound);
}

tch_status tchi_cuda_split_rows(void *state, const tch_rows_to_split *problem)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    if (tchi_cuda_is_empty(tchi_cuda_extent_of(problem->x))) {
        return TCH_OK;
    }
    return problem->x->type == TCH_SCALAR_F64 ? split_rows<double>(s, problem) : split_rows<float>(s, problem);
}

/* --- order ------------------------------------------------------------------------------------------------------- */

#define ORDER_THREADS 256
#define ORDER_LANES 8 /* that share an element: with one, 6 matrices of 3072 kept 72 blocks busy for 47 us */
#define ORDER_ELEMENTS (ORDER_THREADS / ORDER_LANES)

/* Integer keys in the order of the numbers, NaN lowest, -0 equal to 0. Integers because float64 is slow on graphics
 * GPUs. */
static __device__ inline int64_t key_of(double value)
{
    int64_t bits = __double_as_longlong(value + 0.0);
    return isnan(value) ? INT64_MIN : bits < 0 ? bits ^ INT64_MAX : bits;
}

/* How many of w_b precede element i with key `mine`; keys pass through shared memory, and ORDER_LANES lanes share an
 * element. Called by every thread of the block, with or without an element. */
static __device__ int32_t rank_of(const tchi_cuda_operand &w, int64_t b, int64_t n, int64_t i, int64_t mine,
                                  int64_t *keys)
{
    int32_t rank = 0;
    for (int64_t first = 0; first < n; first += ORDER_THREADS) {
        int64_t at = first + threadIdx.x;
        __syncthreads();
        keys[threadIdx.x] =
            at < n ? key_of(tchi_cuda_load<double>(w.type, tchi_cuda_at(w, b, 0, at), 0, w.stride)) : INT64_MIN;
        __syncthreads();
        int count = n - first < ORDER_THREADS ? (int)(n - first) : ORDER_THREADS;
        for (int k = (int)threadIdx.x % ORDER_LANES; k < count; k += ORDER_LANES) {
            rank += keys[k] > mine || (keys[k] == mine && first + k < i) ? 1 : 0;
        }
    }
#pragma unroll
    for (int apart = 1; apart < ORDER_LANES; apart *= 2) {
        rank += __shfl_xor_sync(0xFFFFFFFFu, rank, apart);
    }
    return rank;
}

/* order (batch, n) of w (batch, 1, n): the rank of an element is the number of those before it. Compute: n^2
 * comparisons per matrix, for n = 1024 0.1 % of a matrix product, without scratch or a limit on n. */
static __global__ void __launch_bounds__(ORDER_THREADS)
    descending_kernel(int64_t n, int64_t batch, tchi_cuda_operand w, int32_t *order)
{
    __shared__ int64_t keys[ORDER_THREADS];
    int64_t parts = tchi_cuda_ceil_div(n, ORDER_ELEMENTS);
    for (int64_t part = blockIdx.x; part < parts * batch; part += gridDim.x) {
        int64_t b = part / parts;
        int64_t i = part % parts * ORDER_ELEMENTS + threadIdx.x / ORDER_LANES;
        int64_t mine =
            i < n ? key_of(tchi_cuda_load<double>(w.type, tchi_cuda_at(w, b, 0, i), 0, w.stride)) : INT64_MIN;
        int32_t rank = rank_of(w, b, n, i, mine, keys);
        if (i < n && threadIdx.x % ORDER_LANES == 0) {
            order[b * n + rank] = (int32_t)i;
        }
    }
}

/* order (batch, n). */
static __global__ void __launch_bounds__(ORDER_THREADS)
    reset_order_kernel(int64_t n, int64_t batch, const int32_t *flags, int32_t *order)
{
    for (int64_t k = (int64_t)blockIdx.x * ORDER_THREADS + threadIdx.x; k < n * batch;
         k += (int64_t)gridDim.x * ORDER_THREADS) {
        if (flags[k / n] != 0) {
            order[k] = (int32_t)(k % n);
        }
    }
}

tch_status tchi_cuda_descending(void *state, const tch_matrices *w, const int32_t *flags, int32_t *order)
{
    int64_t n = w->cols, batch = w->batch;
    if (flags != NULL) {
        unsigned grid = tchi_cuda_grid(tchi_cuda_ceil_div(n * batch, ORDER_THREADS));
        return tchi_cuda_launch(state, "reset_order_kernel", reset_order_kernel, grid, ORDER_THREADS, n, batch, flags,
                                order);
    }
    unsigned grid = tchi_cuda_grid(tchi_cuda_ceil_div(n, ORDER_ELEMENTS) * batch);
    return tchi_cuda_launch(state, "descending_kernel", descending_kernel, grid, ORDER_THREADS, n, batch,
                            tchi_cuda_operand_of(w), order);
}

/* --- permute ----------------------------------------------------------------------------------------------------- */

/* Up to four elements of row `from`, the columns named by `cols` or those from j on. */
template <typename real>
static __device__ inline tchi_cuda_vec4<real> load_permuted(const tchi_cuda_operand &x, int64_t b, int64_t from,
                                                            int64_t j, int count, const int32_t *cols)
{
    if (cols == NULL) {
        return tchi_cuda_load_vec4<real>(x, b, from, j, count);
    }
    tchi_cuda_vec4<real> four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        four.v[k] =
            k < count ? tchi_cuda_load<real>(x.type, tchi_cuda_at(x, b, from, cols[j + k]), 0, x.stride) : (real)0;
    }
    return four;
}

/* out(i, j) = X(rows[i], cols[j]); permuted columns are read from a row in L1. */
template <typename real> struct permute {
    tchi_cuda_operand x;
    const int32_t *rows, *cols;
    int64_t width; /* columns of X */
    tchi_cuda_operand out;

    __device__ inline void operator()(const tchi_cuda_patch &p) const
    {
        tchi_cuda_patch_values<real> values;
#pragma unroll
        for (int k = 0; k < TCHI_CUDA_PATCH_STEPS; k++) {
            int64_t i = p.i + k * p.step;
            int64_t from = rows != NULL && i < p.rows ? rows[p.b * p.rows + i] : i;
            values.row[k] = load_permuted<real>(x, p.b, from, p.j, i < p.rows ? p.count : 0,
                                                cols != NULL ? cols + p.b * width : NULL);
        }
        tchi_cuda_store_patch(out, p, values);
    }
};

/* Aligned rows of float32 only: a block per HELD rows, all loaded before the first is written. Memory: X and the result
 * once. */
template <typename real>
static __global__ void __launch_bounds__(SPLIT_THREADS)
    permute_rows_kernel(tchi_cuda_extent e, tchi_cuda_operand x, const int32_t *order, tchi_cuda_operand out)
{
    const int64_t rows = e.batch * e.rows;
    for (int64_t first = (int64_t)blockIdx.x * HELD; first < rows; first += (int64_t)gridDim.x * HELD) {
        const tch_scalar type = sizeof(real) == sizeof(double) ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
        const float *from[HELD];
        real *to[HELD];
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            int64_t r = first + k < rows ? first + k : first;
            from[k] = (const float *)tchi_cuda_at(x, r / e.rows, order[r], 0);
            to[k] = (real *)tchi_cuda_at(out, r / e.rows, r % e.rows, 0);
        }
        for (int j = 4 * (int)threadIdx.x; j < (int)e.cols; j += 4 * SPLIT_THREADS) {
            tchi_cuda_vec4<real> held[HELD];
#pragma unroll
            for (int k = 0; k < HELD; k++) {
                held[k] = tchi_cuda_load_wide<real>(TCH_SCALAR_F32, from[k], j, 0);
            }
#pragma unroll
            for (int k = 0; k < HELD; k++) {
                if (first + k < rows) {
                    tchi_cuda_store_wide<real>(type, to[k], j, 0, held[k]);
                }
            }
        }
    }
}

static tch_status permute_rows(void *state, const tch_matrices *x, const int32_t *rows, const tch_matrices *out)
{
    tchi_cuda_extent e = tchi_cuda_extent_of(out);
    auto kernel = out->type == TCH_SCALAR_F64 ? permute_rows_kernel<double> : permute_rows_kernel<float>;
    return tchi_cuda_launch(state, "permute_rows_kernel", kernel,
                            tchi_cuda_grid(tchi_cuda_ceil_div(e.rows * e.batch, HELD)), SPLIT_THREADS, e,
                            tchi_cuda_operand_of(x), rows, tchi_cuda_operand_of(out));
}

tch_status tchi_cuda_permute(void *state, const tch_matrices *x, const int32_t *rows, const int32_t *cols,
                             const tch_matrices *out)
{
    tchi_cuda_operand from = tchi_cuda_operand_of(x), to = tchi_cuda_operand_of(out);
    if (rows != NULL && cols == NULL && x->type == TCH_SCALAR_F32 && out->cols % 4 == 0 && from.wide && to.wide) {
        return permute_rows(state, x, rows, out);
    }
    return out->type == TCH_SCALAR_F64
               ? tchi_cuda_walk(state, "permute", out, permute<double>{from, rows, cols, out->cols, to})
               : tchi_cuda_walk(state, "permute", out, permute<float>{from, rows, cols, out->cols, to});
}
