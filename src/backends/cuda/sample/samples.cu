/* Per-sample operations: sums over positions, clipping weights, and weighted batches. A sample of weight 0 gives zeros,
 * whatever it contains.
 *
 *     for (b = 0; b < batch; b++) {
 *         out[b][j] = beta * out[b][j] + scale * sum over positions i of x[b][i][j];              // sample_sums
 *         weights[b] = isfinite(squares[b]) ? min(1, most / (sqrt(squares[b]) + 1e-6)) : 0;       // clip_weights, NORM
 *         out[b][i][j] = weights[b / groups] == 0 ? 0 : weights[b / groups] * x[b][i][j];         // weigh_samples
 *     } */
#include "backends/cuda/device/batch_walk.cuh"
#include "backends/rules.h"
#include "position_sums.cuh"

#define THREADS 256

/* --- sums over positions ----------------------------------------------------------------------------------------- */

template <typename real> struct plain_terms {
    static const int outputs = 1;
    tchi_cuda_operand x;

    __device__ inline void load(int64_t b, int64_t i, int64_t j, int count, tchi_cuda_vec4<real> *values) const
    {
        values[0] = tchi_cuda_load_vec4<real>(x, b, i, j, count);
    }
};

/* The same for a type known at compile time in aligned vec4s: without branches, loads overlap. */
template <tch_scalar type> struct aligned_terms {
    static const int outputs = 1;
    tchi_cuda_operand x;

    __device__ inline void load(int64_t b, int64_t i, int64_t j, int count, tchi_cuda_vec4<float> *values) const
    {
        int64_t index = b * x.stride + (count > 0 ? i : 0) * x.ld + j;
        tchi_cuda_vec4<float> four = tchi_cuda_load_wide<float>(type, x.data, index, 0);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            values[0].v[k] = count > 0 ? four.v[k] : 0.0f;
        }
    }
};

int64_t tchi_cuda_sample_sums_scratch(int64_t rows, int64_t cols, int64_t batch)
{
    return tchi_cuda_sum_scratch(batch, rows, cols, 1);
}

tch_status tchi_cuda_sample_sums(void *state, const tch_matrices *x, double scale, double beta, const tch_matrices *out,
                                 void *scratch)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    tchi_cuda_sum_extent e = tchi_cuda_sum_extent_of(x->batch, x->rows, x->cols);
    tchi_cuda_sum_target<1> target = {{tchi_cuda_operand_of(out)}, scale, beta};
    tchi_cuda_operand from = tchi_cuda_operand_of(x);
    const char *name = "sample_sums";
    if (x->type == TCH_SCALAR_F64) {
        return tchi_cuda_run_sums<double>(s, e, plain_terms<double>{from}, target, scratch, name);
    }
    if (!from.wide || x->cols % 4 != 0) {
        return tchi_cuda_run_sums<float>(s, e, plain_terms<float>{from}, target, scratch, name);
    }
    switch (x->type) {
    case TCH_SCALAR_BF16:
        return tchi_cuda_run_sums<float>(s, e, aligned_terms<TCH_SCALAR_BF16>{from}, target, scratch, name);
    case TCH_SCALAR_F16:
        return tchi_cuda_run_sums<float>(s, e, aligned_terms<TCH_SCALAR_F16>{from}, target, scratch, name);
    default:
        return tchi_cuda_run_sums<float>(s, e, aligned_terms<TCH_SCALAR_F32>{from}, target, scratch, name);
    }
}

/* --- per-sample numbers ------------------------------------------------------------------------------------------ */

/* A warp per number of `out`. */
static __global__ void __launch_bounds__(THREADS)
    add_partials_kernel(int64_t count, int64_t each, const double *partial, double scale, double *out)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    for (int64_t i = warp; i < count; i += (int64_t)gridDim.x * (THREADS / 32)) {
        double sum = 0;
        for (int64_t k = lane; k < each; k += 32) {
            sum += partial[i * each + k];
        }
        sum = tchi_cuda_warp_sum(sum);
        if (lane == 0) {
            out[i] += scale * sum;
        }
    }
}

tch_status tchi_cuda_add_partials(const tchi_cuda_state *state, int64_t count, int64_t each, const double *partial,
                                  double scale, double *out)
{
    unsigned blocks = tchi_cuda_grid(tchi_cuda_ceil_div(count, THREADS / 32));
    return tchi_cuda_launch(state, "add_partials", add_partials_kernel, blocks, THREADS, count, each, partial, scale,
                            out);
}

/* --- weights ----------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS)
    clip_weights_kernel(tch_clip_rule rule, int64_t count, const double *squares, double scale, double most,
                        double *weights)
{
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += (int64_t)gridDim.x * THREADS) {
        weights[i] = tchi_rule_clip_weight(rule, scale * squares[i], most);
    }
}

tch_status tchi_cuda_clip_weights(void *state, tch_clip_rule rule, int64_t count, const double *squares, double scale,
                                  double most, double *weights)
{
    unsigned blocks = tchi_cuda_grid(tchi_cuda_ceil_div(count, THREADS));
    return tchi_cuda_launch(state, "clip_weights", clip_weights_kernel, blocks, THREADS, rule, count, squares, scale,
                            most, weights);
}

/* In float64: a weight may be below float32's range. */
template <typename real> struct weigh_samples {
    tchi_cuda_operand x;
    int64_t groups;
    const double *weights;
    int32_t drop_only;
    tchi_cuda_operand out;

    __device__ inline void operator()(const tchi_cuda_patch &p) const
    {
        const double given = weights[p.b / groups];
        const double weight = drop_only && given != 0.0 ? 1.0 : given;
        tchi_cuda_patch_values<real> values = tchi_cuda_load_patch<real>(x, p);
#pragma unroll
        for (int k = 0; k < 4 * TCHI_CUDA_PATCH_STEPS; k++) {
            real *value = &values.row[k / 4].v[k % 4];
            *value = weight != 0.0 ? (real)((double)*value * weight) : (real)0;
        }
        tchi_cuda_store_patch(out, p, values);
    }
};

tch_status tchi_cuda_weigh_samples(void *state, const tch_matrices *x, int64_t groups, const double *weights,
                                   int32_t drop_only, const tch_matrices *out)
{
    tchi_cuda_operand from = tchi_cuda_operand_of(x), to = tchi_cuda_operand_of(out);
    return x->type == TCH_SCALAR_F64 || out->type == TCH_SCALAR_F64
               ? tchi_cuda_walk(state, "weigh_samples", x, weigh_samples<double>{from, groups, weights, drop_only, to})
               : tchi_cuda_walk(state, "weigh_samples", x, weigh_samples<float>{from, groups, weights, drop_only, to});
}
