/* Elementwise operations on batches of matrices. Every element is read once and written once; there is next to no
 * arithmetic. How threads share a batch is in batch_walk.cuh.
 *
 *     for (i = 0; i < rows; i++) {
 *         for (j = 0; j < cols; j++) {
 *             out[i][j] = c0 * (i == j) + c1 * x[i][j] + c2 * y[i][j];    // combine
 *             out[i][j] = x[i][j] * w[i];                                 // scale_rows
 *             out[i][j] = random_bit(seed, i, j) ? 1 : -1;                // random_signs
 *             out[i][j] = flag == TCH_REPORT_OK ? x[i][j] : out[i][j];    // select
 *         }
 *     }
 */
#include "backends/cuda/device/batch_walk.cuh"

/* A missing operand as kernels see it: data NULL. */
static tchi_cuda_operand operand_or_none(const tch_matrices *m)
{
    return m != NULL ? tchi_cuda_operand_of(m) : tchi_cuda_operand{NULL, TCH_SCALAR_F32, 0, 0, 0};
}

static bool is_double(const tch_matrices *m)
{
    return m != NULL && m->type == TCH_SCALAR_F64;
}

/* --- combine ----------------------------------------------------------------------------------------------------- */

template <typename real>
static __device__ inline void accumulate(tchi_cuda_patch_values<real> &sum, real c, const tchi_cuda_operand &m,
                                         const tchi_cuda_patch &p)
{
    tchi_cuda_patch_values<real> values = tchi_cuda_load_patch<real>(m, p);
#pragma unroll
    for (int k = 0; k < TCHI_CUDA_PATCH_STEPS; k++) {
#pragma unroll
        for (int l = 0; l < 4; l++) {
            sum.row[k].v[l] += c * values.row[k].v[l];
        }
    }
}

template <typename real>
static __device__ inline void add_identity(tchi_cuda_patch_values<real> &sum, real c, const tchi_cuda_patch &p)
{
#pragma unroll
    for (int k = 0; k < TCHI_CUDA_PATCH_STEPS; k++) {
#pragma unroll
        for (int l = 0; l < 4; l++) {
            sum.row[k].v[l] += p.i + k * p.step == p.j + l ? c : (real)0;
        }
    }
}

/* out = c0 I + c1 X + c2 Y, all (batch, rows, cols). */
template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_PATCH_THREADS)
    combine_kernel(tchi_cuda_extent e, real c0, real c1, tchi_cuda_operand x, real c2, tchi_cuda_operand y,
                   tchi_cuda_operand out)
{
    tchi_cuda_patch p = tchi_cuda_first_patch(e);
    for (; p.b < e.batch; p.b += gridDim.z) {
        for (p.i = tchi_cuda_first_row(); p.i < e.rows; p.i += tchi_cuda_row_stride()) {
            tchi_cuda_patch_values<real> sum = {};
            if (x.data != NULL) {
                accumulate(sum, c1, x, p);
            }
            if (y.data != NULL) {
                accumulate(sum, c2, y, p);
            }
            add_identity(sum, c0, p);
            tchi_cuda_store_patch(out, p, sum);
        }
    }
}

tch_status tchi_cuda_combine(void *state, double c0, double c1, const tch_matrices *x, double c2, const tch_matrices *y,
                             const tch_matrices *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    tchi_cuda_extent e = tchi_cuda_extent_of(out);
    if (tchi_cuda_is_empty(e)) {
        return TCH_OK;
    }
    tchi_cuda_launch_shape shape = tchi_cuda_shape_for(e);
    if (is_double(x) || is_double(y) || is_double(out)) {
        combine_kernel<double><<<shape.grid, shape.block, 0, s->stream>>>(
            e, c0, c1, operand_or_none(x), c2, operand_or_none(y), tchi_cuda_operand_of(out));
    } else {
        combine_kernel<float><<<shape.grid, shape.block, 0, s->stream>>>(
            e, (float)c0, (float)c1, operand_or_none(x), (float)c2, operand_or_none(y), tchi_cuda_operand_of(out));
    }
    return tchi_cuda_launched(s, "combine");
}

/* --- scale rows -------------------------------------------------------------------------------------------------- */

/* out(i, j) = X(i, j) w(i), w (batch, 1, rows). */
template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_PATCH_THREADS)
    scale_rows_kernel(tchi_cuda_extent e, tchi_cuda_operand x, tchi_cuda_operand w, tchi_cuda_operand out)
{
    tchi_cuda_patch p = tchi_cuda_first_patch(e);
    for (; p.b < e.batch; p.b += gridDim.z) {
        for (p.i = tchi_cuda_first_row(); p.i < e.rows; p.i += tchi_cuda_row_stride()) {
            tchi_cuda_patch_values<real> values = tchi_cuda_load_patch<real>(x, p);
#pragma unroll
            for (int k = 0; k < TCHI_CUDA_PATCH_STEPS; k++) {
                int64_t i = p.i + k * p.step;
                real factor =
                    i < e.rows ? tchi_cuda_load<real>(w.type, tchi_cuda_at(w, p.b, 0, i), 0, w.stride) : (real)0;
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    values.row[k].v[l] *= factor;
                }
            }
            tchi_cuda_store_patch(out, p, values);
        }
    }
}

tch_status tchi_cuda_scale_rows(void *state, const tch_matrices *x, const tch_matrices *w, const tch_matrices *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    tchi_cuda_extent e = tchi_cuda_extent_of(out);
    if (tchi_cuda_is_empty(e)) {
        return TCH_OK;
    }
    tchi_cuda_launch_shape shape = tchi_cuda_shape_for(e);
    auto kernel = is_double(x) || is_double(w) || is_double(out) ? scale_rows_kernel<double> : scale_rows_kernel<float>;
    kernel<<<shape.grid, shape.block, 0, s->stream>>>(e, tchi_cuda_operand_of(x), tchi_cuda_operand_of(w),
                                                      tchi_cuda_operand_of(out));
    return tchi_cuda_launched(s, "scale_rows");
}

/* --- random signs ------------------------------------------------------------------------------------------------ */

/* The same bits as on the CPU, whose function this repeats. */
static __device__ inline uint64_t mix(uint64_t counter)
{
    uint64_t z = counter * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93u;
    z = (z ^ (z >> 29)) * 0xD6E8FEB86659FD93u;
    return z ^ (z >> 32);
}

static __global__ void __launch_bounds__(TCHI_CUDA_PATCH_THREADS)
    random_signs_kernel(tchi_cuda_extent e, uint64_t seed, tchi_cuda_operand out)
{
    tchi_cuda_patch p = tchi_cuda_first_patch(e);
    for (; p.b < e.batch; p.b += gridDim.z) {
        for (p.i = tchi_cuda_first_row(); p.i < e.rows; p.i += tchi_cuda_row_stride()) {
            tchi_cuda_patch_values<float> signs;
#pragma unroll
            for (int k = 0; k < TCHI_CUDA_PATCH_STEPS; k++) {
                uint64_t row = seed + mix((uint64_t)(p.i + k * p.step) + 1);
#pragma unroll
                for (int l = 0; l < 4; l++) {
                    signs.row[k].v[l] = mix(row + (uint64_t)(p.j + l)) >> 63 != 0 ? 1.0f : -1.0f;
                }
            }
            tchi_cuda_store_patch(out, p, signs);
        }
    }
}

tch_status tchi_cuda_random_signs(void *state, uint64_t seed, const tch_matrices *out)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    tchi_cuda_extent e = tchi_cuda_extent_of(out);
    if (tchi_cuda_is_empty(e)) {
        return TCH_OK;
    }
    tchi_cuda_launch_shape shape = tchi_cuda_shape_for(e);
    random_signs_kernel<<<shape.grid, shape.block, 0, s->stream>>>(e, seed, tchi_cuda_operand_of(out));
    return tchi_cuda_launched(s, "random_signs");
}

/* --- select ------------------------------------------------------------------------------------------------------ */

template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_PATCH_THREADS)
    select_kernel(tchi_cuda_extent e, const int32_t *flags, tchi_cuda_operand x, tchi_cuda_operand out)
{
    tchi_cuda_patch p = tchi_cuda_first_patch(e);
    for (; p.b < e.batch; p.b += gridDim.z) {
        if (flags[p.b] != TCH_REPORT_OK) {
            continue;
        }
        for (p.i = tchi_cuda_first_row(); p.i < e.rows; p.i += tchi_cuda_row_stride()) {
            tchi_cuda_store_patch(out, p, tchi_cuda_load_patch<real>(x, p));
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
    tchi_cuda_extent e = tchi_cuda_extent_of(out);
    if (tchi_cuda_is_empty(e)) {
        return TCH_OK;
    }
    tchi_cuda_launch_shape shape = tchi_cuda_shape_for(e);
    tchi_cuda_operand from = selectable(x);
    tchi_cuda_operand to = selectable(out);
    auto kernel =
        from.type == TCH_SCALAR_F64 || to.type == TCH_SCALAR_F64 ? select_kernel<double> : select_kernel<float>;
    kernel<<<shape.grid, shape.block, 0, s->stream>>>(e, flags, from, to);
    return tchi_cuda_launched(s, "select");
}
