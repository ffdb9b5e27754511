/* AdamW, SGD and Lion over all rectangles of a step. Memory-bound: a few operations per 12 to 28 bytes. One thread of a
 * block reduces hyperparameters and clock, in double, to the numbers that the others need while all loads are in
 * flight.
 *
 *     g = grad / grad_scale + (l2 ? weight_decay * p : 0);
 *
 *     m = beta1 * m + (1 - beta1) * g;
 *     v = beta2 * v + (1 - beta2) * g * g;                    // AdamW
 *     largest = max(largest, v);                              // amsgrad, in the place of v below
 *     u = (m / correction1) / (sqrt(v / correction2) + eps);
 *
 *     if (momentum != 0) {
 *         buffer = first step ? g : momentum * buffer + (1 - dampening) * g;    // SGD
 *         g = nesterov ? momentum * buffer + g : buffer;
 *     }
 *     u = g;
 *
 *     c = beta1 * m + (1 - beta1) * g;                        // Lion
 *     u = sign(c);
 *     m = beta2 * m + (1 - beta2) * g;
 *
 *     p = (l2 ? 1 : 1 - lr * weight_decay) * p - lr * factor * u;    // cautious: decays where u * p >= 0 */
#include "backends/rules.h"

#include "moments.cuh"

template <typename real> struct step_numbers {
    real divisor;              /* of gradients */
    real keep1, take1;         /* keep1 m + take1 g: AdamW's m, SGD's buffer, Lion's direction */
    real keep2, take2;         /* AdamW: v = keep2 v + take2 g^2, Lion: m = keep2 m + take2 g */
    real root, eps;            /* of AdamW's divisor, root sqrt(v) + eps; root of 1 / correction2 */
    real l2;                   /* g = g + l2 p */
    real along, against, step; /* p = along p - step u where u p >= 0 */
    int momentum, first, skip;
};

template <typename real>
static __device__ step_numbers<real> betas_of(const tchi_cuda_rects &list, const tchi_cuda_rect &rect, tch_decay decay)
{
    const tch_hyper *h = list.hyper;
    step_numbers<real> n = {};
    n.divisor = tchi_cuda_grad_divisor<real>(list);
    n.keep1 = (real)h->beta1;
    n.take1 = (real)(1.0 - h->beta1);
    n.keep2 = (real)h->beta2;
    n.take2 = (real)(1.0 - h->beta2);
    const tchi_keep keep = tchi_rule_keep(h, decay);
    n.along = (real)keep.along;
    n.against = (real)keep.against;
    n.l2 = decay == TCH_DECAY_L2 ? (real)h->weight_decay : (real)0;
    n.step = (real)(h->lr * rect.factor);
    n.momentum = 1;
    n.skip = tchi_cuda_skips(list);
    return n;
}

/* --- the rules --------------------------------------------------------------------------------------------------- */

template <bool amsgrad_> struct adamw {
    static constexpr tchi_code_use use = TCHI_CODE_ADAMW;
    static constexpr bool amsgrad = amsgrad_, has_squares = true, always_buffered = true;
    tch_decay decay;

    template <typename real>
    __device__ step_numbers<real> numbers(const tchi_cuda_rects &list, const tchi_cuda_rect &rect) const
    {
        const tch_hyper *h = list.hyper;
        step_numbers<real> n = betas_of<real>(list, rect, decay);
        n.root = (real)sqrt(1.0 / rect.clock->correction2);
        n.eps = (real)h->eps;
        n.step = (real)(h->lr * rect.factor / rect.clock->correction1);
        return n;
    }

    template <typename real>
    __device__ inline void update(const step_numbers<real> &n, real &p, real grad, real &m, real &v,
                                  real &largest) const
    {
        real g = n.l2 != 0 ? fma(n.l2, p, grad) : grad;
        m = fma(n.keep1, m, n.take1 * g);
        v = fma(n.keep2, v, n.take2 * g * g);
        real square = v;
        if (amsgrad) {
            square = largest >= square ? largest : square; /* a NaN is the largest */
            largest = square;
        }
        p = fma(m * p >= 0 ? n.along : n.against, p, -(n.step * m / fma(n.root, sqrt(square), n.eps)));
    }
};

struct sgd {
    static constexpr tchi_code_use use = TCHI_CODE_SGD;
    static constexpr bool amsgrad = false, has_squares = false, always_buffered = false;
    tch_decay decay;
    int nesterov;

    template <typename real>
    __device__ step_numbers<real> numbers(const tchi_cuda_rects &list, const tchi_cuda_rect &rect) const
    {
        const tch_hyper *h = list.hyper;
        step_numbers<real> n = betas_of<real>(list, rect, decay);
        n.keep1 = (real)h->momentum;
        n.take1 = (real)(1.0 - h->dampening);
        n.momentum = rect.data[TCHI_CUDA_STATE_0] != NULL && h->momentum != 0.0;
        n.first = n.momentum && rect.clock->step <= 1.0;
        return n;
    }

    /* At the first step the buffer is uninitialized. */
    template <typename real>
    __device__ inline void update(const step_numbers<real> &n, real &p, real grad, real &buffer, real &, real &) const
    {
        real g = n.l2 != 0 ? fma(n.l2, p, grad) : grad;
        if (n.momentum) {
            buffer = n.first ? g : fma(n.keep1, buffer, n.take1 * g);
            g = nesterov ? fma(n.keep1, buffer, g) : buffer;
        }
        p = fma(-n.step, g, (g * p >= 0 ? n.along : n.against) * p);
    }
};

struct lion {
    static constexpr tchi_code_use use = TCHI_CODE_LION;
    static constexpr bool amsgrad = false, has_squares = false, always_buffered = true;
    tch_decay decay;

    template <typename real>
    __device__ step_numbers<real> numbers(const tchi_cuda_rects &list, const tchi_cuda_rect &rect) const
    {
        return betas_of<real>(list, rect, decay);
    }

    /* A NaN is neither above 0 nor below it. */
    template <typename real>
    __device__ inline void update(const step_numbers<real> &n, real &p, real grad, real &m, real &, real &) const
    {
        real g = n.l2 != 0 ? fma(n.l2, p, grad) : grad;
        real direction = fma(n.keep1, m, n.take1 * g);
        real step = direction > 0 ? n.step : direction < 0 ? -n.step : (real)0;
        m = fma(n.keep2, m, n.take2 * g);
        p = fma(step * p >= 0 ? n.along : n.against, p, -step);
    }
};

/* --- the kernel -------------------------------------------------------------------------------------------------- */

template <tch_moments kept, class rule, typename real, tchi_cuda_access_path path>
static __device__ inline void step_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, const rule &how,
                                         step_numbers<real> &numbers)
{
    tchi_cuda_vec4s<real> g = tchi_cuda_fetch(ctx, TCHI_CUDA_GRAD);
    tchi_cuda_vec4s<real> p = tchi_cuda_fetch_param(ctx);
    tchi_cuda_vec4s<real> m = {}, v = {};
    if (rule::always_buffered || tchi_cuda_chunk_has(ctx, TCHI_CUDA_STATE_0)) {
        m = tchi_cuda_fetch_moment<kept>(ctx, 0);
    }
    if (rule::has_squares) {
        v = tchi_cuda_fetch_moment<kept>(ctx, 1);
    }
    tchi_cuda_vec4s<real> largest = tchi_cuda_fetch_if(rule::amsgrad, ctx, TCHI_CUDA_STATE_2);
    if (threadIdx.x == 0) {
        numbers = how.template numbers<real>(ctx.list, ctx.rect);
    }
    __syncthreads();
    if (numbers.skip) {
        return;
    }
    tchi_cuda_unpack_grad(ctx, numbers.divisor, g);
    tchi_cuda_unpack_param(ctx, p);
    tchi_cuda_unpack_moment<kept>(0, m);
    if (rule::has_squares) {
        tchi_cuda_unpack_moment<kept>(1, v);
    }
    tchi_cuda_vec4s<real> was = m;
#pragma unroll
    for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
        how.update(numbers, p.at[k / 4].v[k % 4], g.at[k / 4].v[k % 4], m.at[k / 4].v[k % 4], v.at[k / 4].v[k % 4],
                   largest.at[k / 4].v[k % 4]);
    }
    if (rule::always_buffered || numbers.momentum) {
        tchi_cuda_put_moments<rule::use, kept>(ctx, m, v, was);
    }
    if (rule::amsgrad) {
        tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_2, largest);
    }
    tchi_cuda_put_param(ctx, p);
}

/* Bytes per float32 element, read and written: AdamW 16 and 12, 8 more with amsgrad; SGD 8 and 4, with momentum 12 and
 * 8; Lion 12 and 8. AdamW with bfloat16 moments 12 and 8, with codes 10 and 6 and some 40 more operations. */
template <typename real, class rule, tch_moments kept>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS,
                                         tchi_cuda_moment_resident<real, kept>() - rule::amsgrad)
    step_kernel(const __grid_constant__ tchi_cuda_rects list, rule how)
{
    __shared__ step_numbers<real> numbers;
    tchi_cuda_with_chunk<real, false>(list, [&](const auto &ctx) { step_chunk<kept>(ctx, how, numbers); });
}

template <class rule>
static tch_status launch_step(void *state, const tch_update *update, const char *name, const rule &how)
{
    tchi_cuda_update_kernels<rule> kernels = {step_kernel<double, rule, TCH_MOMENTS_REAL>,
                                              step_kernel<float, rule, TCH_MOMENTS_REAL>};
    if constexpr (!rule::amsgrad) {
        kernels.f32 = update->moments == TCH_MOMENTS_CODES  ? step_kernel<float, rule, TCH_MOMENTS_CODES>
                      : update->moments == TCH_MOMENTS_BF16 ? step_kernel<float, rule, TCH_MOMENTS_BF16>
                                                            : kernels.f32;
    }
    return tchi_cuda_launch_update<rule>(state, update, TCHI_CUDA_PARAMS, name, kernels, how);
}

tch_status tchi_cuda_elementwise(void *state, const tch_update *update, const tch_elementwise_rule *rule)
{
    switch (rule->kind) {
    case TCH_ELEMENTWISE_ADAMW:
        return rule->amsgrad && update->moments == TCH_MOMENTS_REAL
                   ? launch_step(state, update, "adamw", adamw<true>{rule->decay})
                   : launch_step(state, update, "adamw", adamw<false>{rule->decay});
    case TCH_ELEMENTWISE_SGD:
        return launch_step(state, update, "sgd", sgd{rule->decay, rule->nesterov});
    default:
        return launch_step(state, update, "lion", lion{rule->decay});
    }
}
