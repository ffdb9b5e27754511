/* Step control on the device: hyperparameters from the host, clocks, non-finite gradients and loss scales. A few bytes
 * each, except for gradients.
 *
 *     for (each element g of all gradients) {                 // inspect_gradients
 *         found = found || !isfinite(g);
 *         g = unscaling ? g / grad_scale : g;
 *     }
 *     skip = found || found_inf || ranks disagree;            // decide_skip
 *     step += skip ? 0 : 1;                                   // advance
 *     correction1 = 1 - pow(beta1, step), correction2 = 1 - pow(beta2, step);
 *     scale *= found_inf ? backoff : interval is over ? growth : 1;           // update_scale */
#include "backends/rules.h"
#include "updates.cuh"

#define THREADS 128

/* --- numbers ----------------------------------------------------------------------------------------------------- */

#define MOST_NUMBERS 64

typedef struct few_numbers {
    double at[MOST_NUMBERS];
} few_numbers;

/* Passed as kernel parameters, so that no caller memory is read after the launch is queued. */
static __global__ void store_numbers_kernel(const __grid_constant__ few_numbers values, int count, double *dst)
{
    int k = (int)threadIdx.x;
    if (k < count) {
        dst[k] = values.at[k];
    }
}

tch_status tchi_cuda_store_numbers(tchi_cuda_state *s, double *dst, const double *values, int64_t count)
{
    few_numbers numbers = {};
    if (count == 0) {
        return TCH_OK;
    }
    for (int64_t k = 0; k < count; k++) {
        numbers.at[k] = values[k];
    }
    return tchi_cuda_launch(s, "store_numbers", store_numbers_kernel, 1, MOST_NUMBERS, numbers, (int)count, dst);
}

static __global__ void decide_skip_kernel(const int32_t *found, const float *found_inf, const int32_t *agreement,
                                          int32_t *skip, double *counts)
{
    tchi_rule_decide_skip(found, found_inf, agreement, skip, counts);
}

tch_status tchi_cuda_decide_skip(void *state, const int32_t *found, const float *found_inf, const int32_t *agreement,
                                 int32_t *skip, double *counts)
{
    return tchi_cuda_launch(state, "decide_skip", decide_skip_kernel, 1, 1, found, found_inf, agreement, skip, counts);
}

static __global__ void update_scale_kernel(float *scale, int32_t *tracker, const float *found_inf, double growth,
                                           double backoff, int32_t interval)
{
    tchi_rule_update_scale(scale, tracker, found_inf, growth, backoff, interval);
}

tch_status tchi_cuda_update_scale(void *state, float *scale, int32_t *tracker, const float *found_inf, double growth,
                                  double backoff, int32_t interval)
{
    return tchi_cuda_launch(state, "update_scale", update_scale_kernel, 1, 1, scale, tracker, found_inf, growth,
                            backoff, interval);
}

/* --- clocks ------------------------------------------------------------------------------------------------------ */

#define MOST_CLOCKS 512

typedef struct some_clocks {
    tch_clock *at[MOST_CLOCKS];
} some_clocks;

/* A thread for each clock: 64 bytes read and written, three powers. */
static __global__ void __launch_bounds__(THREADS)
    advance_kernel(const __grid_constant__ some_clocks clocks, int count, const tch_hyper *h, const int32_t *skip,
                   int correct, tch_factor_rule rule)
{
    int k = (int)(blockIdx.x * THREADS + threadIdx.x);
    if (k >= count) {
        return;
    }
    tchi_rule_advance(clocks.at[k], h, skip != NULL ? *skip : 0, correct, rule);
}

tch_status tchi_cuda_advance(void *state, int64_t count, tch_clock *const *clocks, const tch_hyper *hyper,
                             const int32_t *skip, int32_t correct, tch_factor_rule rule)
{
    some_clocks some = {};
    for (int64_t first = 0; first < count; first += MOST_CLOCKS) {
        int now = (int)(count - first < MOST_CLOCKS ? count - first : MOST_CLOCKS);
        for (int k = 0; k < now; k++) {
            some.at[k] = clocks[first + k];
        }
        TCHI_TRY(tchi_cuda_launch(state, "advance", advance_kernel, tchi_cuda_grid(tchi_cuda_ceil_div(now, THREADS)),
                                  THREADS, some, now, hyper, skip, correct, rule));
    }
    return TCH_OK;
}

/* --- gradients that are not finite ------------------------------------------------------------------------------- */

/* One of the two results. All writers write the same value. */
typedef struct finding {
    int32_t *found;
    float *found_inf;
} finding;

/* A number rounded as stored. */
template <typename real> static __device__ inline real rounded(tch_scalar type, real value)
{
    switch (type) {
    case TCH_SCALAR_F16:
        return (real)__half2float(tchi_cuda_to_f16(value));
    case TCH_SCALAR_BF16:
        return (real)__bfloat162float(tchi_cuda_to_bf16(value));
    case TCH_SCALAR_F32:
        return (real)(float)value;
    default:
        return value;
    }
}

/* A non-finite number stays so after division, so one check suffices. */
template <typename real, tchi_cuda_access_path path>
static __device__ inline void inspect_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, bool unscale,
                                            const finding &result)
{
    const tch_scalar type = tchi_cuda_chunk_type(ctx, TCHI_CUDA_GRAD);
    tchi_cuda_vec4s<real> g = tchi_cuda_fetch(ctx, TCHI_CUDA_GRAD);
    tchi_cuda_unpack_grad(ctx, unscale ? (real)*ctx.list.grad_scale : (real)1, g);
    bool finite = true; /* as zeros beyond a rectangle's edge are */
#pragma unroll
    for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
        real *value = &g.at[k / 4].v[k % 4];
        *value = unscale ? rounded(type, *value) : *value; /* rounding may overflow: what is stored counts */
        finite = finite && isfinite(*value);
    }
    if (unscale) {
        tchi_cuda_put_all(ctx, TCHI_CUDA_GRAD, g);
    }
    if (!finite && result.found != NULL) {
        *result.found = 1;
    } else if (!finite) {
        *result.found_inf = 1.0f;
    }
}

/* In float32, for an element: 4 bytes read and, with `unscale`, 4 written; one operation. */
template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS)
    inspect_grads_kernel(const __grid_constant__ tchi_cuda_rects list, bool unscale, finding result)
{
    tchi_cuda_with_chunk<real, false>(list, [&](const auto &ctx) { inspect_chunk(ctx, unscale, result); });
}

/* Ignores skip, which depends on this result. */
tch_status tchi_cuda_inspect_gradients(void *state, const tch_update *update, int32_t unscale, int32_t *found,
                                       float *found_inf)
{
    return tchi_cuda_launch_update<bool, finding>(state, update, TCHI_CUDA_PARAMS, "inspect_grads",
                                                  {inspect_grads_kernel<double>, inspect_grads_kernel<float>},
                                                  unscale && update->grad_scale != NULL, {found, found_inf});
}
