/* Lion over all rectangles of a step. As in AdamW memory decides, and one thread of a block reduces the hyperparameters
 * to what the others need. For an element:
 *
 *     c = beta1 m + (1 - beta1) g
 *     p = (1 - lr weight_decay) p - lr sign(c)
 *     m = beta2 m + (1 - beta2) g
 */
#include "moments.cuh"

template <typename real> struct lion_numbers {
    real divisor;      /* of gradients */
    real keep1, take1; /* c = keep1 m + take1 g */
    real keep2, take2; /* m = keep2 m + take2 g */
    real decay;        /* p = decay p - step sign(c) */
    real step;
    int skip;
};

template <typename real>
static __device__ lion_numbers<real> lion_numbers_of(const tchi_cuda_rects &list, const tchi_cuda_rect &rect)
{
    const tch_hyper *h = list.hyper;
    lion_numbers<real> n;
    n.divisor = tchi_cuda_grad_divisor<real>(list);
    n.keep1 = (real)h->beta1;
    n.take1 = (real)(1.0 - h->beta1);
    n.keep2 = (real)h->beta2;
    n.take2 = (real)(1.0 - h->beta2);
    n.decay = (real)(1.0 - h->lr * h->weight_decay);
    n.step = (real)(h->lr * rect.factor);
    n.skip = tchi_cuda_skips(list);
    return n;
}

/* A NaN is neither above 0 nor below it. */
template <typename real>
static __device__ inline void lion_four(const lion_numbers<real> &n, tchi_cuda_vec4<real> &p,
                                        const tchi_cuda_vec4<real> &g, tchi_cuda_vec4<real> &m)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        real direction = fma(n.keep1, m.v[k], n.take1 * g.v[k]);
        real step = direction > 0 ? n.step : direction < 0 ? -n.step : (real)0;
        m.v[k] = fma(n.keep2, m.v[k], n.take2 * g.v[k]);
        p.v[k] = fma(n.decay, p.v[k], -step);
    }
}

template <tch_moments kept, typename real, tchi_cuda_access_path path>
static __device__ inline void lion_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, lion_numbers<real> &numbers)
{
    tchi_cuda_vec4s<real> g = tchi_cuda_fetch(ctx, TCHI_CUDA_GRAD);
    tchi_cuda_vec4s<real> p = tchi_cuda_fetch_param(ctx);
    tchi_cuda_vec4s<real> m = tchi_cuda_fetch_moment<kept>(ctx, 0);
    if (threadIdx.x == 0) {
        numbers = lion_numbers_of<real>(ctx.list, ctx.rect);
    }
    __syncthreads();
    if (numbers.skip) {
        return;
    }
    tchi_cuda_unpack_grad(ctx, numbers.divisor, g);
    tchi_cuda_unpack_param(ctx, p);
    tchi_cuda_unpack_moment<kept>(0, m);
    tchi_cuda_vec4s<real> was = m;
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        lion_four(numbers, p.at[s], g.at[s], m.at[s]);
    }
    tchi_cuda_put_moments<TCHI_CODE_LION, kept>(ctx, m, m, was);
    tchi_cuda_put_param(ctx, p);
}

/* In float32: 12 bytes read and 8 written for an element; 8 operations. */
template <typename real, tch_moments kept>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_moment_resident<real, kept>())
    lion_kernel(const __grid_constant__ tchi_cuda_rects list)
{
    __shared__ lion_numbers<real> numbers;
    tchi_cuda_with_chunk<real, false>(list, [&](const auto &ctx) { lion_chunk<kept>(ctx, numbers); });
}

tch_status tchi_cuda_lion(void *state, const tch_update *update)
{
    tchi_cuda_update_kernels<> kernels = {lion_kernel<double, TCH_MOMENTS_REAL>, lion_kernel<float, TCH_MOMENTS_REAL>,
                                          NULL};
    kernels = tchi_cuda_choose_moments(update, kernels, lion_kernel<float, TCH_MOMENTS_BF16>,
                                       lion_kernel<float, TCH_MOMENTS_CODES>);
    return tchi_cuda_launch_update<>(state, update, TCHI_CUDA_PARAMS, "lion", kernels);
}

tch_status tchi_cuda_elementwise(void *state, const tch_update *update, const tch_elementwise_rule *rule)
{
    switch (rule->kind) {
    case TCH_ELEMENTWISE_ADAMW:
        return tchi_cuda_adamw(state, update, rule->amsgrad, rule->l2);
    case TCH_ELEMENTWISE_SGD:
        return tchi_cuda_sgd(state, update, rule->nesterov);
    default:
        return tchi_cuda_lion(state, update);
    }
}
