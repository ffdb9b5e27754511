/* The Kronecker product of each pair of a batch: out(i p + k, j q + l) = A(i, j) B(k, l) for A m by n and B p by q,
 * bound by writing the result. A thread keeps its columns, so that it divides only to find its start, and walks down
 * ROWS rows; A and B come from L1. */
#include <type_traits>

#include "backends/cuda/device/elements.cuh"

/* 8192 by 8192 of float32 takes 60.9 us on an H200, like cudaMemset; 4 to 16 rows and 64 to 256 threads are all within
 * 1 us, except 2 rows (78 us) and 16 rows with 256 threads (71 us). */
#define THREADS 256
#define ROWS 8

typedef struct kronecker_params {
    tchi_cuda_operand a, b, out;
    int64_t rows, cols, batch; /* of the result */
    int64_t p, q;              /* rows and columns of B */
    int64_t step_a, step_b;    /* blockDim.y rows of the result in rows of A, and the rows of B left over */
    int32_t stream;            /* the result exceeds L2: do not keep it there */
} kronecker_params;

/* A row of the result as a row of A and one of B. */
typedef struct row_pair {
    int64_t a, b;
} row_pair;

static __device__ inline row_pair row_below(const kronecker_params &params, row_pair at)
{
    bool wraps = at.b + params.step_b >= params.p;
    return {at.a + params.step_a + (wraps ? 1 : 0), at.b + params.step_b - (wraps ? params.p : 0)};
}

/* --- one type, and rows of B in whole vectors of 16 bytes -------------------------------------------------------- */

template <typename T> struct __align__(16) vector
{
    T v[16 / sizeof(T)];
};

template <typename T> static __device__ inline T multiply_rounded(T a, T b)
{
    if constexpr (std::is_same<T, __half>::value) {
        return __float2half_rn(__half2float(a) * __half2float(b));
    } else if constexpr (std::is_same<T, __nv_bfloat16>::value) {
        return __float2bfloat16_rn(__bfloat162float(a) * __bfloat162float(b));
    } else {
        return a * b;
    }
}

/* Streaming stores if the result exceeds the cache. Both are intrinsics: the compiler would split an ordinary store of
 * 16-bit elements. */
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

/* Rows `row`, row + blockDim.y, ..., at most ROWS, in the thread's columns, at which a, b and out point in the first
 * rows. All reads precede all writes. */
template <typename T>
static __device__ inline void write_rows(const kronecker_params &params, int row, const T *a, const T *b, T *out)
{
    int row_a = row / (int)params.p;
    int row_b = row - row_a * (int)params.p;
    int count = ((int)params.rows - row + (int)blockDim.y - 1) / (int)blockDim.y;
    T from_a[ROWS];
    uint4 from_b[ROWS]; /* elements of 16 bits would take a register each */
    a += row_a * params.a.ld;
    b += row_b * params.b.ld;
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
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
    for (int k = 0; k < ROWS; k++) {
        if (k < count) {
            write_scaled(out, from_a[k], from_b[k], params.stream);
        }
        out += blockDim.y * params.out.ld;
    }
}

template <typename T> static __global__ void __launch_bounds__(THREADS) kronecker_vector_kernel(kronecker_params params)
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
        for (int64_t row = blockIdx.y * blockDim.y * ROWS + threadIdx.y; row < params.rows;
             row += (int64_t)gridDim.y * blockDim.y * ROWS) {
            write_rows<T>(params, (int)row, a, b, out);
        }
    }
}

/* --- any q and any alignment ------------------------------------------------------------------------------------- */

/* Columns of A and B for a thread's four columns. */
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
            row_pair at = {row / params.p, row % params.p};
            for (int k = 0; k < ROWS && row < params.rows; k++) {
                write_row_any<real>(params, batch, row, column, count, at, pairs);
                row += blockDim.y;
                at = row_below(params, at);
            }
        }
    }
}

/* --- launcher ---------------------------------------------------------------------------------------------------- */

/* A thread has `wide` columns. Blocks cover whole rows if possible: stores then fill DRAM pages sequentially. */
static tch_status launch_kronecker(void *state, void (*kernel)(kronecker_params), kronecker_params params, int64_t wide)
{
    dim3 block = tchi_cuda_block_for(tchi_cuda_ceil_div(params.cols, wide), 1, THREADS);
    block.y = THREADS / block.x;
    params.step_a = block.y / params.p;
    params.step_b = block.y % params.p;
    dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(params.cols, block.x * wide)),
              tchi_cuda_grid_yz(tchi_cuda_ceil_div(params.rows, block.y * ROWS)), tchi_cuda_grid_yz(params.batch));
    return tchi_cuda_launch(state, "kronecker", kernel, grid, block, params);
}

static bool has_vectors(const tch_matrices *m)
{
    int64_t wide = 16 / tchi_cuda_size(m->type);
    return (uintptr_t)m->data % 16 == 0 && m->ld % wide == 0 && m->stride % wide == 0;
}

/* Rows and columns are counted in 32 bits then. */
static bool vectors_supported(const tch_matrices *a, const tch_matrices *b, const tch_matrices *out)
{
    return a->type == out->type && b->type == out->type && out->type != TCH_SCALAR_BF16X2 && has_vectors(b) &&
           has_vectors(out) && b->cols % (16 / tchi_cuda_size(out->type)) == 0 && out->rows < 0x40000000 &&
           out->cols < 0x40000000;
}

tch_status tchi_cuda_kronecker(void *state, const tch_matrices *a, const tch_matrices *b, const tch_matrices *out)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    const int64_t size = tchi_cuda_size(out->type);
    if (out->rows == 0 || out->cols == 0 || out->batch == 0) {
        return TCH_OK;
    }
    kronecker_params params = {tchi_cuda_operand_of(a),
                               tchi_cuda_operand_of(b),
                               tchi_cuda_operand_of(out),
                               out->rows,
                               out->cols,
                               out->batch,
                               b->rows,
                               b->cols,
                               0,
                               0,
                               out->batch * out->rows * out->cols * size > s->device.l2_bytes};
    if (!vectors_supported(a, b, out)) {
        bool wide = out->type == TCH_SCALAR_F64 || a->type == TCH_SCALAR_F64 || b->type == TCH_SCALAR_F64;
        return launch_kronecker(state, wide ? kronecker_any_kernel<double> : kronecker_any_kernel<float>, params, 4);
    }
    auto kernel = out->type == TCH_SCALAR_F64   ? kronecker_vector_kernel<double>
                  : out->type == TCH_SCALAR_F32 ? kronecker_vector_kernel<float>
                  : out->type == TCH_SCALAR_F16 ? kronecker_vector_kernel<__half>
                                                : kronecker_vector_kernel<__nv_bfloat16>;
    return launch_kronecker(state, kernel, params, 16 / size);
}
