/* SGD over all rectangles of a step, with or without momentum. As in AdamW memory decides, and one thread of a block
 * reduces the hyperparameters to what the others need.
 *
 *     g = grad / grad_scale + weight_decay * p;
 *     if (momentum != 0) {
 *         buffer = first step ? g : momentum * buffer + (1 - dampening) * g;
 *         g = nesterov ? momentum * buffer + g : buffer;
 *     }
 *     p -= lr * factor * g;
 */
#include "moments.cuh"

template <typename real> struct sgd_numbers {
    real divisor;    /* of gradients */
    real l2;         /* g = g + l2 p */
    real keep, take; /* buffer = keep buffer + take g */
    real step;       /* p = p - step g */
    int momentum, first, skip;
};

template <typename real>
static __device__ sgd_numbers<real> sgd_numbers_of(const tchi_cuda_rects &list, const tchi_cuda_rect &rect)
{
    const tch_hyper *h = list.hyper;
    sgd_numbers<real> n;
    n.divisor = tchi_cuda_grad_divisor<real>(list);
    n.l2 = (real)h->weight_decay;
    n.keep = (real)h->momentum;
    n.take = (real)(1.0 - h->dampening);
    n.step = (real)(h->lr * rect.factor);
    n.momentum = rect.data[TCHI_CUDA_STATE_0] != NULL && h->momentum != 0.0;
    n.first = n.momentum && rect.clock->step <= 1.0;
    n.skip = tchi_cuda_skips(list);
    return n;
}

/* At the first step the buffer holds nothing yet, not even numbers. */
template <typename real>
static __device__ inline void sgd_four(const sgd_numbers<real> &n, int nesterov, tchi_cuda_vec4<real> &p,
                                       const tchi_cuda_vec4<real> &grad, tchi_cuda_vec4<real> &buffer)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        real g = n.l2 != 0 ? fma(n.l2, p.v[k], grad.v[k]) : grad.v[k];
        if (n.momentum) {
            buffer.v[k] = n.first ? g : fma(n.keep, buffer.v[k], n.take * g);
            g = nesterov ? fma(n.keep, buffer.v[k], g) : buffer.v[k];
        }
        p.v[k] = fma(-n.step, g, p.v[k]);
    }
}

template <tch_moments kept, typename real, tchi_cuda_access_path path>
static __device__ inline void sgd_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, int nesterov,
                                        sgd_numbers<real> &numbers)
{
    bool buffered = tchi_cuda_chunk_has(ctx, TCHI_CUDA_STATE_0);
    tchi_cuda_vec4s<real> g = tchi_cuda_fetch(ctx, TCHI_CUDA_GRAD);
    tchi_cuda_vec4s<real> p = tchi_cuda_fetch_param(ctx);
    tchi_cuda_vec4s<real> buffer = {};
    if (buffered) {
        buffer = tchi_cuda_fetch_moment<kept>(ctx, 0);
    }
    if (threadIdx.x == 0) {
        numbers = sgd_numbers_of<real>(ctx.list, ctx.rect);
    }
    __syncthreads();
    if (numbers.skip) {
        return;
    }
    tchi_cuda_unpack_grad(ctx, numbers.divisor, g);
    tchi_cuda_unpack_param(ctx, p);
    tchi_cuda_unpack_moment<kept>(0, buffer);
    tchi_cuda_vec4s<real> was = buffer;
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        sgd_four(numbers, nesterov, p.at[s], g.at[s], buffer.at[s]);
    }
    if (numbers.momentum) {
        tchi_cuda_put_moments<TCHI_CODE_SGD, kept>(ctx, buffer, buffer, was);
    }
    tchi_cuda_put_param(ctx, p);
}

/* In float32: 8 bytes read and 4 written for an element, and as many as 12 and 8 with momentum; up to 8 operations. */
template <typename real, tch_moments kept>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_moment_resident<real, kept>())
    sgd_kernel(const __grid_constant__ tchi_cuda_rects list, int nesterov)
{
    __shared__ sgd_numbers<real> numbers;
    tchi_cuda_with_chunk<real, false>(list, [&](const auto &ctx) { sgd_chunk<kept>(ctx, nesterov, numbers); });
}

tch_status tchi_cuda_sgd(void *state, const tch_update *update, int32_t nesterov)
{
    tchi_cuda_update_kernels<int> kernels = {sgd_kernel<double, TCH_MOMENTS_REAL>, sgd_kernel<float, TCH_MOMENTS_REAL>,
                                             NULL};
    kernels = tchi_cuda_choose_moments(update, kernels, sgd_kernel<float, TCH_MOMENTS_BF16>,
                                       sgd_kernel<float, TCH_MOMENTS_CODES>);
    return tchi_cuda_launch_update<int>(state, update, TCHI_CUDA_PARAMS, "sgd", kernels, nesterov);
}
