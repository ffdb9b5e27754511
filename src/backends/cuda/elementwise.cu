/* Elementwise operations on batches of matrices. All walk the batch alike: the grid is columns by rows by matrices, a
 * thread takes four neighbouring columns of STEPS rows and loads them all before it stores any, which keeps memory busy
 * and makes working in place safe. Every element is read once and written once; there is next to no arithmetic. */
#include <type_traits>

#include "cuda.h"
#include "elements.cuh"

#define THREADS 256 /* of a block */

/* Rows a thread holds. Two make 32 bytes of float32 under way in a thread and at least 32 KB on a processor, where an
 * H200 needs about 25 KB to cover the latency of its memory (700 ns at 4.8 TB/s over 132 processors). */
#define STEPS 2

/* Of shift_scale, where types are known to the compiler: rows a thread holds, and the most blocks for each processor,
 * few enough that each takes a power for several patches. Reasoned, not yet measured: bench/kernels/memory_bench.cu. */
#define SHIFT_SCALE_STEPS 4
#define SHIFT_SCALE_BLOCKS 16

/* --- walking a batch ---------------------------------------------------------------------------------------------- */

typedef struct extent {
    int64_t rows, cols, batch;
} extent;

/* What one thread has in hand: rows i, i + step, ..., columns j to j + count of matrix b. */
typedef struct patch {
    int64_t b, i, j, step, rows;
    int count;
} patch;

template <typename real> struct patch_values {
    tchi_cuda_four<real> row[STEPS];
};

static __device__ inline patch first_patch(const extent &e)
{
    int64_t j = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    int64_t left = e.cols - j;
    return {blockIdx.z, 0, j, blockDim.y, e.rows, left < 0 ? 0 : left < 4 ? (int)left : 4};
}

static __device__ inline int64_t first_row()
{
    return (int64_t)blockIdx.y * blockDim.y * STEPS + threadIdx.y;
}

/* From one patch of a matrix to the thread's next one below it. */
static __device__ inline int64_t row_stride()
{
    return (int64_t)gridDim.y * blockDim.y * STEPS;
}

template <typename real> static __device__ inline patch_values<real> load(const tchi_cuda_operand &m, const patch &p)
{
    patch_values<real> values;
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        int64_t i = p.i + k * p.step;
        values.row[k] = tchi_cuda_load_four<real>(m, p.b, i, p.j, i < p.rows ? p.count : 0);
    }
    return values;
}

template <typename real>
static __device__ inline void store(const tchi_cuda_operand &m, const patch &p, const patch_values<real> &values)
{
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        int64_t i = p.i + k * p.step;
        tchi_cuda_store_four<real>(m, p.b, i, p.j, i < p.rows ? p.count : 0, values.row[k]);
    }
}

/* --- launching ---------------------------------------------------------------------------------------------------- */

typedef struct launch_shape {
    dim3 grid, block;
} launch_shape;

static launch_shape shape_for(const extent &e, int64_t steps = STEPS)
{
    dim3 block = tchi_cuda_block_for(tchi_cuda_ceil_div(e.cols, 4), e.rows, THREADS);
    int64_t across = tchi_cuda_ceil_div(e.cols, (int64_t)block.x * 4);
    int64_t down = tchi_cuda_ceil_div(e.rows, (int64_t)block.y * steps);
    return {dim3(tchi_cuda_grid(across), tchi_cuda_grid_yz(down), tchi_cuda_grid_yz(e.batch)), block};
}

static extent extent_of(const tch_matrices *m)
{
    return {m->rows, m->cols, m->batch};
}

static bool is_empty(const extent &e)
{
    return e.rows == 0 || e.cols == 0 || e.batch == 0;
}

/* A missing operand as kernels see it: data NULL. */
static tchi_cuda_operand operand_or_none(const tch_matrices *m)
{
    return m != NULL ? tchi_cuda_operand_of(m) : tchi_cuda_operand{NULL, TCH_SCALAR_F32, 0, 0, 0};
}

static bool is_double(const tch_matrices *m)
{
    return m != NULL && m->type == TCH_SCALAR_F64;
}

/* --- combine ------------------------------------------------------------------------------------------------------ */

template <typename real>
static __device__ inline void accumulate(patch_values<real> &sum, real c, const tchi_cuda_operand &m, const patch &p)
{
    patch_values<real> values = load<real>(m, p);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int l = 0; l < 4; l++) {
            sum.row[k].v[l] += c * values.row[k].v[l];
        }
    }
}

template <typename real> static __device__ inline void add_identity(patch_values<real> &sum, real c, const patch &p)
{
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int l = 0; l < 4; l++) {
            sum.row[k].v[l] += p.i + k * p.step == p.j + l ? c : (real)0;
        }
    }
}

/* out = c0 I + c1 X + c2 Y, all (batch, rows, cols). */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    combine_kernel(extent e, real c0, real c1, tchi_cuda_operand x, real c2, tchi_cuda_operand y, tchi_cuda_operand out)
{
    patch p = first_patch(e);
    for (; p.b < e.batch; p.b += gridDim.z) {
        for (p.i = first_row(); p.i < e.rows; p.i += row_stride()) {
            patch_values<real> sum = {};
            if (x.data != NULL) {
                accumulate(sum, c1, x, p);
            }
            if (y.data != NULL) {
                accumulate(sum, c2, y, p);
            }
            add_identity(sum, c0, p);
            store(out, p, sum);
        }
    }
}

tch_status tchi_cuda_combine(void *state, double c0, double c1, const tch_matrices *x, double c2, const tch_matrices *y,
                             const tch_matrices *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    extent e = extent_of(out);
    if (is_empty(e)) {
        return TCH_OK;
    }
    launch_shape shape = shape_for(e);
    if (is_double(x) || is_double(y) || is_double(out)) {
        combine_kernel<double><<<shape.grid, shape.block, 0, s->stream>>>(
            e, c0, c1, operand_or_none(x), c2, operand_or_none(y), tchi_cuda_operand_of(out));
    } else {
        combine_kernel<float><<<shape.grid, shape.block, 0, s->stream>>>(
            e, (float)c0, (float)c1, operand_or_none(x), (float)c2, operand_or_none(y), tchi_cuda_operand_of(out));
    }
    return tchi_cuda_launched(s, "combine");
}

/* --- shift and scale ---------------------------------------------------------------------------------------------- */

typedef struct shift_scale_factors {
    const double *shift, *scale; /* one per matrix, or NULL */
    double exponent;
} shift_scale_factors;

static __device__ inline double factor_of(const shift_scale_factors &f, int64_t b)
{
    if (f.scale == NULL) {
        return 1.0;
    }
    return f.exponent == 1.0 ? f.scale[b] : pow(f.scale[b], f.exponent);
}

/* The shift may be far below the rounding of the diagonal's type, so those elements are worked out in double. */
template <typename real>
static __device__ inline void store_diagonal(const tchi_cuda_operand &out, const patch &p,
                                             const patch_values<real> &values, double shift, double factor)
{
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        int64_t i = p.i + k * p.step;
        int64_t l = i - p.j;
        if (i < p.rows && l >= 0 && l < p.count) {
            const real *v = values.row[k].v;
            double value = (double)(l < 2 ? (l == 0 ? v[0] : v[1]) : (l == 2 ? v[2] : v[3]));
            tchi_cuda_store<double>(out.type, tchi_cuda_at(out, p.b, i, i), 0, out.stride, (value + shift) * factor);
        }
    }
}

template <typename real>
static __device__ inline void store_scaled(const tchi_cuda_operand &out, const patch &p, patch_values<real> values,
                                           real factor)
{
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int l = 0; l < 4; l++) {
            values.row[k].v[l] *= factor;
        }
    }
    store(out, p, values);
}

/* out_b = (X_b + shift_b I) scale_b^exponent. One thread of a block takes the power, while the block's first loads are
 * on their way. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    shift_scale_kernel(extent e, tchi_cuda_operand x, shift_scale_factors f, tchi_cuda_operand out)
{
    __shared__ double factor;
    patch p = first_patch(e);
    for (; p.b < e.batch; p.b += gridDim.z) {
        p.i = first_row();
        patch_values<real> values = load<real>(x, p);
        if (threadIdx.x == 0 && threadIdx.y == 0) {
            factor = factor_of(f, p.b);
        }
        __syncthreads();
        while (p.i < e.rows) {
            store_scaled(out, p, values, (real)factor);
            if (f.shift != NULL) {
                store_diagonal(out, p, values, f.shift[p.b], factor);
            }
            p.i += row_stride();
            values = load<real>(x, p);
        }
        __syncthreads();
    }
}

/* --- shift and scale of whole fours, from and to types that the compiler knows ------------------------------------- */

/* Where a type is looked up for every row, its conversion waits for that row before the next one is asked for. */
template <typename real, tch_scalar type, int steps>
static __device__ inline void load_known(tchi_cuda_four<real> (&values)[steps], const tchi_cuda_operand &m, int64_t b,
                                         int64_t i, int64_t j, const extent &e)
{
    const char *from = tchi_cuda_at(m, b, 0, min(j, e.cols - 4));
#pragma unroll
    for (int k = 0; k < steps; k++) { /* beyond the end the last row is read again, and not stored */
        int64_t row = min(i + (int64_t)(k * blockDim.y), e.rows - 1);
        values[k] = tchi_cuda_load_wide<real>(type, from, row * m.ld, m.stride);
    }
}

template <typename real, tch_scalar type, int steps>
static __device__ inline void store_known(const tchi_cuda_operand &m, int64_t b, int64_t i, int64_t j, const extent &e,
                                          const tchi_cuda_four<real> (&values)[steps], const double *shift,
                                          double factor)
{
    char *to = tchi_cuda_at(m, b, 0, j);
#pragma unroll
    for (int k = 0; k < steps; k++) {
        int64_t row = i + (int64_t)(k * blockDim.y);
        if (row >= e.rows || j >= e.cols) {
            continue;
        }
        tchi_cuda_four<real> four = values[k];
#pragma unroll
        for (int l = 0; l < 4; l++) {
            four.v[l] *= (real)factor;
        }
        tchi_cuda_store_wide<real>(type, to, row * m.ld, m.stride, four);
        if (shift != NULL && row >= j && row < j + 4) {
            const real *v = values[k].v;
            double value = (double)(row < j + 2 ? (row == j ? v[0] : v[1]) : (row == j + 2 ? v[2] : v[3]));
            tchi_cuda_store<double>(type, to, row * m.ld + (row - j), m.stride, (value + shift[b]) * factor);
        }
    }
}

/* Moves: every element in and out, once. Does: one product and one conversion each way. */
template <typename real, tch_scalar source, tch_scalar target, int steps>
static __global__ void __launch_bounds__(THREADS)
    shift_scale_known_kernel(extent e, tchi_cuda_operand x, shift_scale_factors f, tchi_cuda_operand out)
{
    __shared__ double factor;
    int64_t j = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    int64_t down = (int64_t)gridDim.y * blockDim.y * steps;
    for (int64_t b = blockIdx.z; b < e.batch; b += gridDim.z) {
        int64_t i = (int64_t)blockIdx.y * blockDim.y * steps + threadIdx.y;
        tchi_cuda_four<real> values[steps];
        load_known<real, source, steps>(values, x, b, i, j, e);
        if (threadIdx.x == 0 && threadIdx.y == 0) {
            factor = factor_of(f, b);
        }
        __syncthreads();
        while (true) {
            store_known<real, target, steps>(out, b, i, j, e, values, f.shift, factor);
            i += down;
            if (i >= e.rows) {
                break;
            }
            load_known<real, source, steps>(values, x, b, i, j, e);
        }
        __syncthreads();
    }
}

/* At most `most` blocks, beyond those that are needed across a matrix and for the batch. */
template <tch_scalar source, tch_scalar target, int steps>
static void launch_known(cudaStream_t stream, const extent &e, const tchi_cuda_operand &x, const shift_scale_factors &f,
                         const tchi_cuda_operand &out, int64_t most)
{
    constexpr bool in_double = source == TCH_SCALAR_F64 || target == TCH_SCALAR_F64;
    typedef typename std::conditional<in_double, double, float>::type real;
    launch_shape shape = shape_for(e, steps);
    int64_t down = most / ((int64_t)shape.grid.x * shape.grid.z);
    shape.grid.y = (unsigned)(down < 1 ? 1 : down < shape.grid.y ? down : shape.grid.y);
    shift_scale_known_kernel<real, source, target, steps><<<shape.grid, shape.block, 0, stream>>>(e, x, f, out);
}

template <tch_scalar source>
static void launch_known_from(cudaStream_t stream, const extent &e, const tchi_cuda_operand &x,
                              const shift_scale_factors &f, const tchi_cuda_operand &out, int64_t most)
{
    if (out.type == TCH_SCALAR_F64) {
        launch_known<source, TCH_SCALAR_F64, SHIFT_SCALE_STEPS>(stream, e, x, f, out, most);
    } else if (out.type == TCH_SCALAR_F32) {
        launch_known<source, TCH_SCALAR_F32, SHIFT_SCALE_STEPS>(stream, e, x, f, out, most);
    } else {
        launch_known<source, TCH_SCALAR_BF16X2, SHIFT_SCALE_STEPS>(stream, e, x, f, out, most);
    }
}

static bool is_known(const tchi_cuda_operand &m, const extent &e)
{
    bool type = m.type == TCH_SCALAR_F64 || m.type == TCH_SCALAR_F32 || m.type == TCH_SCALAR_BF16X2;
    return type && m.wide && e.cols % 4 == 0;
}

static void launch_shift_scale(const tchi_cuda_state *s, const extent &e, const tchi_cuda_operand &x,
                               const shift_scale_factors &f, const tchi_cuda_operand &out)
{
    int64_t most = (int64_t)s->device.processors * SHIFT_SCALE_BLOCKS;
    launch_shape shape = shape_for(e);
    if (is_known(x, e) && is_known(out, e)) {
        if (x.type == TCH_SCALAR_F64) {
            launch_known_from<TCH_SCALAR_F64>(s->stream, e, x, f, out, most);
        } else if (x.type == TCH_SCALAR_F32) {
            launch_known_from<TCH_SCALAR_F32>(s->stream, e, x, f, out, most);
        } else {
            launch_known_from<TCH_SCALAR_BF16X2>(s->stream, e, x, f, out, most);
        }
    } else if (x.type == TCH_SCALAR_F64 || out.type == TCH_SCALAR_F64) {
        shift_scale_kernel<double><<<shape.grid, shape.block, 0, s->stream>>>(e, x, f, out);
    } else {
        shift_scale_kernel<float><<<shape.grid, shape.block, 0, s->stream>>>(e, x, f, out);
    }
}

tch_status tchi_cuda_shift_scale(void *state, const tch_matrices *x, const double *shift, const double *scale,
                                 double exponent, const tch_matrices *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    extent e = extent_of(out);
    if (is_empty(e)) {
        return TCH_OK;
    }
    launch_shift_scale(s, e, tchi_cuda_operand_of(x), {shift, scale, exponent}, tchi_cuda_operand_of(out));
    return tchi_cuda_launched(s, "shift_scale");
}

/* --- scale rows --------------------------------------------------------------------------------------------------- */

/* out(i, j) = X(i, j) w(i), w (batch, 1, rows). */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    scale_rows_kernel(extent e, tchi_cuda_operand x, tchi_cuda_operand w, tchi_cuda_operand out)
{
    patch p = first_patch(e);
    for (; p.b < e.batch; p.b += gridDim.z) {
        for (p.i = first_row(); p.i < e.rows; p.i += row_stride()) {
            patch_values<real> values = load<real>(x, p);
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                int64_t i = p.i + k * p.step;
                real factor =
                    i < e.rows ? tchi_cuda_load<real>(w.type, tchi_cuda_at(w, p.b, 0, i), 0, w.stride) : (real)0;
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    values.row[k].v[l] *= factor;
                }
            }
            store(out, p, values);
        }
    }
}

tch_status tchi_cuda_scale_rows(void *state, const tch_matrices *x, const tch_matrices *w, const tch_matrices *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    extent e = extent_of(out);
    if (is_empty(e)) {
        return TCH_OK;
    }
    launch_shape shape = shape_for(e);
    if (is_double(x) || is_double(w) || is_double(out)) {
        scale_rows_kernel<double><<<shape.grid, shape.block, 0, s->stream>>>(
            e, tchi_cuda_operand_of(x), tchi_cuda_operand_of(w), tchi_cuda_operand_of(out));
    } else {
        scale_rows_kernel<float><<<shape.grid, shape.block, 0, s->stream>>>(
            e, tchi_cuda_operand_of(x), tchi_cuda_operand_of(w), tchi_cuda_operand_of(out));
    }
    return tchi_cuda_launched(s, "scale_rows");
}

/* --- random signs ------------------------------------------------------------------------------------------------- */

/* The same bits as on the CPU, whose function this repeats. */
static __device__ inline uint64_t mix(uint64_t counter)
{
    uint64_t z = counter * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93u;
    z = (z ^ (z >> 29)) * 0xD6E8FEB86659FD93u;
    return z ^ (z >> 32);
}

static __global__ void __launch_bounds__(THREADS) random_signs_kernel(extent e, uint64_t seed, tchi_cuda_operand out)
{
    patch p = first_patch(e);
    for (; p.b < e.batch; p.b += gridDim.z) {
        for (p.i = first_row(); p.i < e.rows; p.i += row_stride()) {
            patch_values<float> signs;
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                uint64_t row = seed + mix((uint64_t)(p.i + k * p.step) + 1);
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    signs.row[k].v[l] = mix(row + (uint64_t)(p.j + l)) >> 63 != 0 ? 1.0f : -1.0f;
                }
            }
            store(out, p, signs);
        }
    }
}

tch_status tchi_cuda_random_signs(void *state, uint64_t seed, const tch_matrices *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    extent e = extent_of(out);
    if (is_empty(e)) {
        return TCH_OK;
    }
    launch_shape shape = shape_for(e);
    random_signs_kernel<<<shape.grid, shape.block, 0, s->stream>>>(e, seed, tchi_cuda_operand_of(out));
    return tchi_cuda_launched(s, "random_signs");
}

/* --- select ------------------------------------------------------------------------------------------------------- */

template <typename real>
static __global__ void __launch_bounds__(THREADS)
    select_kernel(extent e, const int32_t *flags, tchi_cuda_operand x, tchi_cuda_operand out)
{
    patch p = first_patch(e);
    for (; p.b < e.batch; p.b += gridDim.z) {
        if (flags[p.b] != TCH_REPORT_OK) {
            continue;
        }
        for (p.i = first_row(); p.i < e.rows; p.i += row_stride()) {
            store(out, p, load<real>(x, p));
        }
    }
}

/* Integers pass as floats of their size, which are carried over bit by bit where the types are equal. */
static tchi_cuda_operand selectable(const tch_matrices *m)
{
    tch_matrices floats = *m;
    floats.type = m->type == TCH_SCALAR_I32 ? TCH_SCALAR_F32 : m->type == TCH_SCALAR_I64 ? TCH_SCALAR_F64 : m->type;
    return tchi_cuda_operand_of(&floats);
}

tch_status tchi_cuda_select(void *state, const int32_t *flags, const tch_matrices *x, const tch_matrices *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    extent e = extent_of(out);
    if (is_empty(e)) {
        return TCH_OK;
    }
    launch_shape shape = shape_for(e);
    tchi_cuda_operand from = selectable(x);
    tchi_cuda_operand to = selectable(out);
    if (from.type == TCH_SCALAR_F64 || to.type == TCH_SCALAR_F64) {
        select_kernel<double><<<shape.grid, shape.block, 0, s->stream>>>(e, flags, from, to);
    } else {
        select_kernel<float><<<shape.grid, shape.block, 0, s->stream>>>(e, flags, from, to);
    }
    return tchi_cuda_launched(s, "select");
}
