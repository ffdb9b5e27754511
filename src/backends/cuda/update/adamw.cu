/* AdamW over all rectangles of a step. Memory decides: beside seven accesses there is one square root and one division
 * for an element. What hyperparameters and the clock come down to is worked out in double by one thread of a block,
 * while the loads of all of them are under way.
 *
 *     g = grad / grad_scale + (l2 ? weight_decay * p : 0);
 *     m = beta1 * m + (1 - beta1) * g;
 *     v = beta2 * v + (1 - beta2) * g * g;
 *     largest = max(largest, v);                              // amsgrad, in the place of v below
 *     p = (l2 ? 1 : 1 - lr * weight_decay) * p;
 *     p -= lr * factor * (m / correction1) / (sqrt(v / correction2) + eps);
 */
#include "moments.cuh"

/* vec4s of a thread. With two, the four arrays that are read have 32 KB under way for a block, about what a processor
 * of an H200 needs (700 ns at 4.8 TB/s over 132 of them), and several blocks fit. */
template <typename real> struct adamw_numbers {
    real divisor;      /* of gradients */
    real keep1, take1; /* m = keep1 m + take1 g */
    real keep2, take2; /* v = keep2 v + take2 g^2 */
    real root;         /* of 1 / correction2 */
    real eps;
    real l2;    /* g = g + l2 p */
    real decay; /* p = decay p - step m / (root sqrt(v) + eps) */
    real step;
    int skip;
};

template <typename real>
static __device__ adamw_numbers<real> adamw_numbers_of(const tchi_cuda_rects &list, const tchi_cuda_rect &rect, int l2)
{
    const tch_hyper *h = list.hyper;
    adamw_numbers<real> n;
    n.divisor = tchi_cuda_grad_divisor<real>(list);
    n.keep1 = (real)h->beta1;
    n.take1 = (real)(1.0 - h->beta1);
    n.keep2 = (real)h->beta2;
    n.take2 = (real)(1.0 - h->beta2);
    n.root = (real)sqrt(1.0 / rect.clock->correction2);
    n.eps = (real)h->eps;
    n.l2 = l2 ? (real)h->weight_decay : (real)0;
    n.decay = l2 ? (real)1 : (real)(1.0 - h->lr * h->weight_decay);
    n.step = (real)(h->lr * rect.factor / rect.clock->correction1);
    n.skip = tchi_cuda_skips(list);
    return n;
}

/* `largest` is the largest v so far, or NULL. */
template <typename real>
static __device__ inline void adamw_four(const adamw_numbers<real> &n, tchi_cuda_vec4<real> &p,
                                         const tchi_cuda_vec4<real> &grad, tchi_cuda_vec4<real> &m,
                                         tchi_cuda_vec4<real> &v, tchi_cuda_vec4<real> *largest)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        real g = n.l2 != 0 ? fma(n.l2, p.v[k], grad.v[k]) : grad.v[k];
        m.v[k] = fma(n.keep1, m.v[k], n.take1 * g);
        v.v[k] = fma(n.keep2, v.v[k], n.take2 * g * g);
        real square = v.v[k];
        if (largest != NULL) {
            square = largest->v[k] >= square ? largest->v[k] : square; /* a NaN is the largest */
            largest->v[k] = square;
        }
        p.v[k] = fma(n.decay, p.v[k], -(n.step * m.v[k] / fma(n.root, sqrt(square), n.eps)));
    }
}

template <bool amsgrad, tch_moments kept, typename real, tchi_cuda_access_path path>
static __device__ inline void adamw_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, int l2,
                                          adamw_numbers<real> &numbers)
{
    tchi_cuda_vec4s<real> g = tchi_cuda_fetch(ctx, TCHI_CUDA_GRAD);
    tchi_cuda_vec4s<real> p = tchi_cuda_fetch_param(ctx);
    tchi_cuda_vec4s<real> m = tchi_cuda_fetch_moment<kept>(ctx, 0);
    tchi_cuda_vec4s<real> v = tchi_cuda_fetch_moment<kept>(ctx, 1);
    tchi_cuda_vec4s<real> largest = tchi_cuda_fetch_if(amsgrad, ctx, TCHI_CUDA_STATE_2);
    if (threadIdx.x == 0) {
        numbers = adamw_numbers_of<real>(ctx.list, ctx.rect, l2);
    }
    __syncthreads();
    if (numbers.skip) {
        return;
    }
    tchi_cuda_unpack_grad(ctx, numbers.divisor, g);
    tchi_cuda_unpack_param(ctx, p);
    tchi_cuda_unpack_moment<kept>(0, m);
    tchi_cuda_unpack_moment<kept>(1, v);
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        adamw_four(numbers, p.at[s], g.at[s], m.at[s], v.at[s], amsgrad ? &largest.at[s] : NULL);
    }
    tchi_cuda_put_moments<TCHI_CODE_ADAMW, kept>(ctx, m, v, m);
    if (amsgrad) {
        tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_2, largest);
    }
    tchi_cuda_put_param(ctx, p);
}

/* In float32: 16 bytes read and 12 written for an element, and 8 more with amsgrad; some 15 operations. With moments in
 * bfloat16 12 and 8, in codes 10 and 6, and some 40 operations more, half of them for the random bits. */
template <typename real, bool amsgrad, tch_moments kept>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_moment_resident<real, kept>() - amsgrad)
    adamw_kernel(const __grid_constant__ tchi_cuda_rects list, int l2)
{
    __shared__ adamw_numbers<real> numbers;
    tchi_cuda_with_chunk<real, false>(list, [&](const auto &ctx) { adamw_chunk<amsgrad, kept>(ctx, l2, numbers); });
}

tch_status tchi_cuda_adamw(void *state, const tch_update *update, int32_t amsgrad, int32_t l2)
{
    const tch_moments real = TCH_MOMENTS_REAL;
    tchi_cuda_update_kernels<int> kernels = {adamw_kernel<double, false, real>, adamw_kernel<float, false, real>, NULL};
    if (amsgrad) {
        kernels = {adamw_kernel<double, true, real>, adamw_kernel<float, true, real>, NULL};
    }
    kernels = tchi_cuda_choose_moments(update, kernels, adamw_kernel<float, false, TCH_MOMENTS_BF16>,
                                       adamw_kernel<float, false, TCH_MOMENTS_CODES>);
    return tchi_cuda_launch_update(state, update, TCHI_CUDA_PARAMS, "adamw", kernels, l2);
}
