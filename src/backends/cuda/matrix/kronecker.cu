/* The Kronecker product of each pair of a batch: out(i p + k, j q + l) = A(i, j) B(k, l) for A m by n and B p by q.
 * Writing the result is all there is to it. A thread keeps its columns of the result, so that the only divisions are
 * those that find where it begins, and walks down ROWS rows; A and B come from the nearest cache. */
#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"

/* On an H200, 8192 by 8192 of float32 is written in 60.9 us, which is what cudaMemset takes; 4 to 16 rows and 64 to 256
 * threads are all within 1 us, except for 2 rows (78 us) and 16 rows with 256 threads (71 us). */
#define THREADS 256
#define ROWS 8

typedef struct kronecker_job {
    tchi_cuda_operand a, b, out;
    int64_t rows, cols, batch; /* of the result */
    int64_t p, q;              /* rows and columns of B */
    int64_t step_a, step_b;    /* blockDim.y rows of the result in rows of A, and the rows of B left over */
    int32_t stream;            /* the result is too large for the second-level cache: do not keep it there */
} kronecker_job;

/* A row of the result as a row of A and one of B. */
typedef struct row_pair {
    int64_t a, b;
} row_pair;

static __device__ inline row_pair row_at(const kronecker_job &job, int64_t row)
{
    int64_t a = row / job.p;
    return {a, row - a * job.p};
}

static __device__ inline row_pair row_below(const kronecker_job &job, row_pair at)
{
    at.a += job.step_a;
    at.b += job.step_b;
    if (at.b >= job.p) {
        at.b -= job.p;
        at.a++;
    }
    return at;
}

/* --- one type, and rows of B in whole vectors of 16 bytes -------------------------------------------------------- */

template <typename T> struct __align__(16) vector
{
    T v[16 / sizeof(T)];
};

static __device__ inline double product(double a, double b)
{
    return a * b;
}

static __device__ inline float product(float a, float b)
{
    return a * b;
}

static __device__ inline __half product(__half a, __half b)
{
    return __float2half_rn(__half2float(a) * __half2float(b));
}

static __device__ inline __nv_bfloat16 product(__nv_bfloat16 a, __nv_bfloat16 b)
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
        b.v[k] = product(a, b.v[k]);
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
static __device__ inline void write_rows(const kronecker_job &job, int row, const T *a, const T *b, T *out)
{
    int row_a = row / (int)job.p;
    int row_b = row - row_a * (int)job.p;
    int count = ((int)job.rows - row + (int)blockDim.y - 1) / (int)blockDim.y;
    T from_a[rows];
    uint4 from_b[rows]; /* elements of 16 bits would take a register each */
    a += row_a * job.a.ld;
    b += row_b * job.b.ld;
#pragma unroll
    for (int k = 0; k < rows; k++) {
        if (k < count) {
            from_a[k] = *a;
            from_b[k] = *(const uint4 *)b;
        }
        a += job.step_a * job.a.ld;
        b += job.step_b * job.b.ld;
        row_b += (int)job.step_b;
        if (row_b >= (int)job.p) {
            a += job.a.ld;
            b -= job.p * job.b.ld;
            row_b -= (int)job.p;
        }
    }
    out += row * job.out.ld;
#pragma unroll
    for (int k = 0; k < rows; k++) {
        if (k < count) {
            write_scaled(out, from_a[k], from_b[k], job.stream);
        }
        out += blockDim.y * job.out.ld;
    }
}

/* Moves: the result, once, 16 bytes a thread and store. Does: one product per element. */
template <typename T, int rows>
static __global__ void __launch_bounds__(THREADS) kronecker_vector_kernel(kronecker_job job)
{
    unsigned column = (blockIdx.x * blockDim.x + threadIdx.x) * (unsigned)(16 / sizeof(T));
    unsigned column_a = column / (unsigned)job.q;
    unsigned column_b = column - column_a * (unsigned)job.q;
    if (column >= job.cols) {
        return;
    }
    for (int64_t batch = blockIdx.z; batch < job.batch; batch += gridDim.z) {
        const T *a = (const T *)job.a.data + batch * job.a.stride + column_a;
        const T *b = (const T *)job.b.data + batch * job.b.stride + column_b;
        T *out = (T *)job.out.data + batch * job.out.stride + column;
        for (int64_t row = blockIdx.y * blockDim.y * rows + threadIdx.y; row < job.rows;
             row += (int64_t)gridDim.y * blockDim.y * rows) {
            write_rows<T, rows>(job, (int)row, a, b, out);
        }
    }
}

/* --- any q and any alignment ------------------------------------------------------------------------------------- */

/* Where the factors of a thread's four columns lie within a row of A and of B. */
typedef struct column_pairs {
    int64_t a[4], b[4];
} column_pairs;

static __device__ inline column_pairs columns_from(const kronecker_job &job, int64_t column)
{
    column_pairs pairs;
    pairs.a[0] = column / job.q;
    pairs.b[0] = column - pairs.a[0] * job.q;
#pragma unroll
    for (int k = 1; k < 4; k++) {
        bool wrap = pairs.b[k - 1] + 1 == job.q;
        pairs.a[k] = pairs.a[k - 1] + (wrap ? 1 : 0);
        pairs.b[k] = wrap ? 0 : pairs.b[k - 1] + 1;
    }
    return pairs;
}

template <typename real>
static __device__ inline void write_row_any(const kronecker_job &job, int64_t batch, int64_t row, int64_t column,
                                            int count, row_pair at, const column_pairs &pairs)
{
    const char *a = tchi_cuda_at(job.a, batch, at.a, 0);
    const char *b = tchi_cuda_at(job.b, batch, at.b, 0);
    tchi_cuda_four<real> four = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k < count) {
            four.v[k] = tchi_cuda_load<real>(job.a.type, a, pairs.a[k], job.a.stride) *
                        tchi_cuda_load<real>(job.b.type, b, pairs.b[k], job.b.stride);
        }
    }
    tchi_cuda_store_four<real>(job.out, batch, row, column, count, four);
}

template <typename real> static __global__ void __launch_bounds__(THREADS) kronecker_any_kernel(kronecker_job job)
{
    int64_t column = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    int64_t left = job.cols - column;
    int count = left < 4 ? (int)left : 4;
    column_pairs pairs = columns_from(job, column);
    if (left <= 0) {
        return;
    }
    for (int64_t batch = blockIdx.z; batch < job.batch; batch += gridDim.z) {
        for (int64_t tile = blockIdx.y; tile * blockDim.y * ROWS < job.rows; tile += gridDim.y) {
            int64_t row = tile * blockDim.y * ROWS + threadIdx.y;
            row_pair at = row_at(job, row);
            for (int k = 0; k < ROWS && row < job.rows; k++) {
                write_row_any<real>(job, batch, row, column, count, at, pairs);
                row += blockDim.y;
                at = row_below(job, at);
            }
        }
    }
}

/* --- launcher ---------------------------------------------------------------------------------------------------- */

typedef struct launch_shape {
    dim3 grid, block;
} launch_shape;

/* A block has whole rows as far as it can: stores then fill memory's pages one after another. */
static launch_shape shape_for(kronecker_job *job, int64_t wide, int64_t threads, int64_t rows)
{
    dim3 block = tchi_cuda_block_for(tchi_cuda_ceil_div(job->cols, wide), 1, threads);
    block.y = (unsigned)(threads / block.x);
    job->step_a = block.y / job->p;
    job->step_b = block.y % job->p;
    dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(job->cols, block.x * wide)),
              tchi_cuda_grid_yz(tchi_cuda_ceil_div(job->rows, block.y * rows)), tchi_cuda_grid_yz(job->batch));
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

template <typename T, int rows> static void launch_vector(kronecker_job job, int64_t threads, cudaStream_t stream)
{
    launch_shape shape = shape_for(&job, 16 / sizeof(T), threads, rows);
    kronecker_vector_kernel<T, rows><<<shape.grid, shape.block, 0, stream>>>(job);
}

static void launch_typed(const kronecker_job &job, cudaStream_t stream)
{
    switch (job.out.type) {
    case TCH_SCALAR_F64:
        launch_vector<double, ROWS>(job, THREADS, stream);
        break;
    case TCH_SCALAR_F32:
        launch_vector<float, ROWS>(job, THREADS, stream);
        break;
    case TCH_SCALAR_F16:
        launch_vector<__half, ROWS>(job, THREADS, stream);
        break;
    default:
        launch_vector<__nv_bfloat16, ROWS>(job, THREADS, stream);
        break;
    }
}

template <typename real> static void launch_any(kronecker_job job, cudaStream_t stream)
{
    launch_shape shape = shape_for(&job, 4, THREADS, ROWS);
    kronecker_any_kernel<real><<<shape.grid, shape.block, 0, stream>>>(job);
}

static kronecker_job job_of(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *b,
                            const tch_matrices *out)
{
    int64_t bytes = out->batch * out->rows * out->cols * tchi_cuda_size(out->type);
    kronecker_job job = {};
    job.a = tchi_cuda_operand_of(a);
    job.b = tchi_cuda_operand_of(b);
    job.out = tchi_cuda_operand_of(out);
    job.rows = out->rows;
    job.cols = out->cols;
    job.batch = out->batch;
    job.p = b->rows;
    job.q = b->cols;
    job.stream = bytes > state->device.l2_bytes;
    return job;
}

tch_status tchi_cuda_kronecker(void *state, const tch_matrices *a, const tch_matrices *b, const tch_matrices *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    if (out->rows == 0 || out->cols == 0 || out->batch == 0) {
        return TCH_OK;
    }
    kronecker_job job = job_of(s, a, b, out);
    if (takes_vectors(a, b, out)) {
        launch_typed(job, s->stream);
    } else if (out->type == TCH_SCALAR_F64 || a->type == TCH_SCALAR_F64 || b->type == TCH_SCALAR_F64) {
        launch_any<double>(job, s->stream);
    } else {
        launch_any<float>(job, s->stream);
    }
    return tchi_cuda_launched(s, "kronecker");
}
