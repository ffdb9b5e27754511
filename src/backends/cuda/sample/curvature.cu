/* What KFAC does to a gradient besides products: the division in the eigenbasis. Divisors are formed in float64: the
 * product of two small eigenvalues may be below float32's range, and so may the damping.
 *
 *     for (i = 0; i < rows; i++) {
 *         for (j = 0; j < cols; j++) {
 *             by = values == NULL ? max(row[i], 0) * max(col[j], 0) : max(values[i][j], 0);
 *             x[i][j] /= by + damping;                        // damped_divide
 *         }
 *     }
 */
#include "backends/cuda/device/batch_walk.cuh"

typedef struct divisors {
    tchi_cuda_operand rows, cols; /* without data where `values` has it */
    tchi_cuda_operand values;
    double damping;
} divisors;

/* NaN stays. */
static __device__ inline double at_least_0(double x)
{
    return x < 0.0 ? 0.0 : x;
}

template <typename real>
static __device__ inline void divide_row(const divisors &d, const tchi_cuda_patch &p, int64_t i, int count,
                                         const tchi_cuda_vec4<real> &cols, tchi_cuda_vec4<real> &x)
{
    bool whole = d.values.data != NULL;
    tchi_cuda_vec4<real> by = whole ? tchi_cuda_load_vec4<real>(d.values, p.b, i, p.j, count) : cols;
    double row = whole || count == 0
                     ? 1.0
                     : at_least_0((double)tchi_cuda_load<real>(d.rows.type, tchi_cuda_at(d.rows, p.b, 0, i), 0, 0));
#pragma unroll
    for (int k = 0; k < 4; k++) {
        x.v[k] = (real)((double)x.v[k] / (row * at_least_0((double)by.v[k]) + d.damping));
    }
}

/* x, values (rows, cols). Moves: 8 bytes an element of float32, 12 with values. Does: a product, a sum and a
 * quotient. */
template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_PATCH_THREADS)
    damped_divide_kernel(tchi_cuda_extent e, tchi_cuda_operand x, const __grid_constant__ divisors d)
{
    tchi_cuda_patch p = tchi_cuda_first_patch(e);
    for (; p.b < e.batch; p.b += gridDim.z) {
        tchi_cuda_vec4<real> cols = {};
        if (d.values.data == NULL) {
            cols = tchi_cuda_load_vec4<real>(d.cols, p.b, 0, p.j, p.count);
        }
        for (p.i = tchi_cuda_first_row(); p.i < e.rows; p.i += tchi_cuda_row_stride()) {
            tchi_cuda_patch_values<real> values = tchi_cuda_load_patch<real>(x, p);
#pragma unroll
            for (int k = 0; k < TCHI_CUDA_PATCH_STEPS; k++) {
                int64_t i = p.i + k * p.step;
                divide_row(d, p, i, i < e.rows ? p.count : 0, cols, values.row[k]);
            }
            tchi_cuda_store_patch(x, p, values);
        }
    }
}

tch_status tchi_cuda_damped_divide(void *state, const tch_matrices *x, const tch_matrices *rows,
                                   const tch_matrices *cols, const tch_matrices *values, double damping)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    tchi_cuda_extent e = tchi_cuda_extent_of(x);
    if (tchi_cuda_is_empty(e)) {
        return TCH_OK;
    }
    divisors d = {};
    if (rows != NULL) {
        d.rows = tchi_cuda_operand_of(rows);
        d.cols = tchi_cuda_operand_of(cols);
    } else {
        d.values = tchi_cuda_operand_of(values);
    }
    d.damping = damping;
    tchi_cuda_launch_shape shape = tchi_cuda_shape_for(e);
    auto kernel = x->type == TCH_SCALAR_F64 ? damped_divide_kernel<double> : damped_divide_kernel<float>;
    kernel<<<shape.grid, shape.block, 0, s->stream>>>(e, tchi_cuda_operand_of(x), d);
    return tchi_cuda_launched(s, "damped_divide");
}
