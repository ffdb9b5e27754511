/* The Kronecker product of each pair of a batch: out(i p + k, j q + l) = A(i, j) B(k, l) for A m by n and B p by q.
 * Writing the result is all there is to it. A thread keeps its columns of the result, so that the only divisions are
 * those that find where it begins, and walks down ROWS rows; A and B come from the nearest cache. */
#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"

/* On an H200, 8192 by 8192 of float32 is written in 60.9 us, which is what cudaMemset takes; 4 to 16 rows and 64 to 256
 * threads are all within 1 us, except for 2 rows (78 us) and 16 rows with 256 threads (71 us). */
#define THREADS 256
#define ROWS 8

typedef struct kronecker_params {
    tchi_cuda_operand a, b, out;
    int64_t rows, cols, batch; /* of the result */
    int64_t p, q;              /* rows and columns of B */
    int64_t step_a, step_b;    /* blockDim.y rows of the result in rows of A, and the rows of B left over */
    int32_t stream;            /* the result is too large for the second-level cache: do not keep it there */
} kronecker_params;

/* A row of the result as a row of A and one of B. */
typedef struct row_pair {
    int64_t a, b;
} row_pair;

static __device__ inline row_pair row_at(const kronecker_params &params, int64_t row)
{
    int64_t a = row / params.p;
    return {a, row - a * params.p};
}

static __device__ inline row_pair row_below(const kronecker_params &params, row_pair at)
{
    at.a += params.step_a;
    at.b += params.step_b;
    if (at.b >= params.p) {
        at.b -= params.p;
        at.a++;
    }
    return at;
}

/* --- one type, and rows of B in whole vectors of 16 bytes -------------------------------------------------------- */

template <typename T> struct __align__(16) vector
{
    T v[16 / sizeof(T)];
};

static __device__ inline double multiply_rounded(double a, double b)
{
    return a * b;
}

static __device__ inline float multiply_rounded(float a, float b)
{
    return a * b;
}

static __device__ inline __half multiply_rounded(__half a, __half b)
{
    return __float2half_rn(__half2float(a) * __half2float(b));
}

static __device__ inline __nv_bfloat16 multiply_rounded(__nv_bfloat16 a, __nv_bfloat16 b)
{
    return __float2bfloat16_rn(__bfloat162float(a) * __bfloat162float(b));
}

/* To a result that will not be found in the cache anyway, past it. Both are intrinsics: an ordinary store is taken
 * apart by the compiler, into single elements where these have 16 bits. */
template <typename T> static __device__ inline void write_scaled(T *to, T a, uint4 bits, bool stream)
{
    vector<T> b = *(const vector<T> *)&bits;
#pragma unroll
    for (int k = 0; k < (int)(16 / sizeof(T)); k++) {
        b.v[k] = multiply_rounded(a, b.v[k]);
    }
    if (stream) {
        __stcs((uint4 *)to, *(const uint4 *)&b);
    } else {
        __stwb((uint4 *)to, *(const uint4 *)&b);
    }
}

/* Rows `row`, row + blockDim.y, ... of a matrix, at most `rows` of them, in the thread's columns, at which a, b and out
 * point in the matrices' first rows. Everything is read before anything is written. */
template <typename T, int rows>
static __device__ inline void write_rows(const kronecker_params &params, int row, const T *a, const T *b, T *out)
{
    int row_a = row / (int)params.p;
    int row_b = row - row_a * (int)params.p;
    int count = ((int)params.rows - row + (int)blockDim.y - 1) / (int)blockDim.y;
    T from_a[rows];
    uint4 from_b[rows]; /* elements of 16 bits would take a register each */
    a += row_a * params.a.ld;
    b += row_b * params.b.ld;
#pragma unroll
    for (int k = 0; k < rows; k++) {
        if (k < count) {
            from_a[k] = *a;
            from_b[k] = *(const uint4 *)b;
        }
        a += params.step_a * params.a.ld;
        b += params.step_b * params.b.ld;
        row_b += (int)params.step_b;
        if (row_b >= (int)params.p) {
            a += params.a.ld;
            b -= params.p * params.b.ld;
            row_b -= (int)params.p;
        }
    }
    out += row * params.out.ld;
#pragma unroll
    for (int k = 0; k < rows; k++) {
        if (k < count) {
            write_scaled(out, from_a[k], from_b[k], params.stream);
        }
        out += blockDim.y * params.out.ld;
    }
}

/* Moves: the result, once, 16 bytes a thread and store. Does: one product per element. */
template <typename T, int rows>
static __global__ void __launch_bounds__(THREADS) kronecker_vector_kernel(kronecker_params params)
{
    unsigned column = (blockIdx.x * blockDim.x + threadIdx.x) * (unsigned)(16 / sizeof(T));
    unsigned column_a = column / (unsigned)params.q;
    unsigned column_b = column - column_a * (unsigned)params.q;
    if (column >= params.cols) {
        return;
    }
    for (int64_t batch = blockIdx.z; batch < params.batch; batch += gridDim.z) {
        const T *a = (const T *)params.a.data + batch * params.a.stride + column_a;
        const T *b = (const T *)params.b.data + batch * params.b.stride + column_b;
        T *out = (T *)params.out.data + batch * params.out.stride + column;
        for (int64_t row = blockIdx.y * blockDim.y * rows + threadIdx.y; row < params.rows;
             row += (int64_t)gridDim.y * blockDim.y * rows) {
            write_rows<T, rows>(params, (int)row, a, b, out);
        }
    }
}

/* --- any q and any alignment ------------------------------------------------------------------------------------- */

/* Where the factors of a thread's four columns lie within a row of A and of B. */
typedef struct column_pairs {
    int64_t a[4], b[4];
} column_pairs;

static __device__ inline column_pairs columns_from(const kronecker_params &params, int64_t column)
{
    column_pairs pairs;
    pairs.a[0] = column / params.q;
    pairs.b[0] = column - pairs.a[0] * params.q;
#pragma unroll
    for (int k = 1; k < 4; k++) {
        bool wrap = pairs.b[k - 1] + 1 == params.q;
        pairs.a[k] = pairs.a[k - 1] + (wrap ? 1 : 0);
        pairs.b[k] = wrap ? 0 : pairs.b[k - 1] + 1;
    }
    return pairs;
}

template <typename real>
static __device__ inline void write_row_any(const kronecker_params &params, int64_t batch, int64_t row, int64_t column,
                                            int count, row_pair at, const column_pairs &pairs)
{
    const char *a = tchi_cuda_at(params.a, batch, at.a, 0);
    const char *b = tchi_cuda_at(params.b, batch, at.b, 0);
    tchi_cuda_vec4<real> four = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k < count) {
            four.v[k] = tchi_cuda_load<real>(params.a.type, a, pairs.a[k], params.a.stride) *
                        tchi_cuda_load<real>(params.b.type, b, pairs.b[k], params.b.stride);
        }
    }
    tchi_cuda_store_vec4<real>(params.out, batch, row, column, count, four);
}

template <typename real> static __global__ void __launch_bounds__(THREADS) kronecker_any_kernel(kronecker_params params)
{
    int64_t column = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    int64_t left = params.cols - column;
    int count = left < 4 ? (int)left : 4;
    column_pairs pairs = columns_from(params, column);
    if (left <= 0) {
        return;
    }
    for (int64_t batch = blockIdx.z; batch < params.batch; batch += gridDim.z) {
        for (int64_t tile = blockIdx.y; tile * blockDim.y * ROWS < params.rows; tile += gridDim.y) {
            int64_t row = tile * blockDim.y * ROWS + threadIdx.y;
            row_pair at = row_at(params, row);
            for (int k = 0; k < ROWS && row < params.rows; k++) {
                write_row_any<real>(params, batch, row, column, count, at, pairs);
                row += blockDim.y;
                at = row_below(params, at);
            }
        }
    }
}

/* --- launcher ---------------------------------------------------------------------------------------------------- */

typedef struct launch_shape {
    dim3 grid, block;
} launch_shape;

/* A block has whole rows as far as it can: stores then fill memory's pages one after another. */
static launch_shape shape_for(kronecker_params *params, int64_t wide, int64_t threads, int64_t rows)
{
    dim3 block = tchi_cuda_block_for(tchi_cuda_ceil_div(params->cols, wide), 1, threads);
    block.y = (unsigned)(threads / block.x);
    params->step_a = block.y / params->p;
    params->step_b = block.y % params->p;
    dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(params->cols, block.x * wide)),
              tchi_cuda_grid_yz(tchi_cuda_ceil_div(params->rows, block.y * rows)), tchi_cuda_grid_yz(params->batch));
    return {grid, block};
}

static bool has_vectors(const tch_matrices *m)
{
    int64_t wide = 16 / tchi_cuda_size(m->type);
    return (uintptr_t)m->data % 16 == 0 && m->ld % wide == 0 && m->stride % wide == 0;
}

/* Rows and columns are counted in 32 bits then. */
static bool takes_vectors(const tch_matrices *a, const tch_matrices *b, const tch_matrices *out)
{
    return a->type == out->type && b->type == out->type && out->type != TCH_SCALAR_BF16X2 && has_vectors(b) &&
           has_vectors(out) && b->cols % (16 / tchi_cuda_size(out->type)) == 0 && out->rows < 0x40000000 &&
           out->cols < 0x40000000;
}

template <typename T, int rows> static void launch_vector(kronecker_params params, int64_t threads, cudaStream_t stream)
{
    launch_shape shape = shape_for(&params, 16 / sizeof(T), threads, rows);
    kronecker_vector_kernel<T, rows><<<shape.grid, shape.block, 0, stream>>>(params);
}

static void launch_typed(const kronecker_params &params, cudaStream_t stream)
{
    switch (params.out.type) {
    case TCH_SCALAR_F64:
        launch_vector<double, ROWS>(params, THREADS, stream);
        break;
    case TCH_SCALAR_F32:
        launch_vector<float, ROWS>(params, THREADS, stream);
        break;
    case TCH_SCALAR_F16:
        launch_vector<__half, ROWS>(params, THREADS, stream);
        break;
    default:
        launch_vector<__nv_bfloat16, ROWS>(params, THREADS, stream);
        break;
    }
}

template <typename real> static void launch_any(kronecker_params params, cudaStream_t stream)
{
    launch_shape shape = shape_for(&params, 4, THREADS, ROWS);
    kronecker_any_kernel<real><<<shape.grid, shape.block, 0, stream>>>(params);
}

static kronecker_params params_of(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *b,
                                  const tch_matrices *out)
{
    int64_t bytes = out->batch * out->rows * out->cols * tchi_cuda_size(out->type);
    kronecker_params params = {};
    params.a = tchi_cuda_operand_of(a);
    params.b = tchi_cuda_operand_of(b);
    params.out = tchi_cuda_operand_of(out);
    params.rows = out->rows;
    params.cols = out->cols;
    params.batch = out->batch;
    params.p = b->rows;
    params.q = b->cols;
    params.stream = bytes > state->device.l2_bytes;
    return params;
}

tch_status tchi_cuda_kronecker(void *state, const tch_matrices *a, const tch_matrices *b, const tch_matrices *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    if (out->rows == 0 || out->cols == 0 || out->batch == 0) {
        return TCH_OK;
    }
    kronecker_params params = params_of(s, a, b, out);
    if (takes_vectors(a, b, out)) {
        launch_typed(params, s->stream);
    } else if (out->type == TCH_SCALAR_F64 || a->type == TCH_SCALAR_F64 || b->type == TCH_SCALAR_F64) {
        launch_any<double>(params, s->stream);
    } else {
        launch_any<float>(params, s->stream);
    }
    return tchi_cuda_launched(s, "kronecker");
}
