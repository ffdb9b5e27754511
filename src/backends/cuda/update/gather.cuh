/* The parts of reading gradients into blocks: see blocks.cu. */
#ifndef TCHI_CUDA_GATHER_CUH
#define TCHI_CUDA_GATHER_CUH

#include "updates.cuh"

template <typename real> struct gather_numbers {
    real divisor;    /* of gradients */
    real l2;         /* g = g + l2 p */
    real keep, take; /* s = keep s + take g */
    real corrected;  /* 1 / correction1 */
    int skip;
};

template <typename real>
static __device__ gather_numbers<real> gather_numbers_of(const tchi_cuda_rects &list, const tchi_cuda_rect &rect,
                                                         tch_filter filter)
{
    gather_numbers<real> n;
    n.divisor = tchi_cuda_grad_divisor<real>(list);
    n.l2 = (real)list.hyper->weight_decay;
    n.keep = (real)list.hyper->beta1;
    n.take = (real)(1.0 - list.hyper->beta1);
    n.corrected = filter == TCH_FILTER_EMA ? (real)(1.0 / rect.clock->correction1) : (real)1;
    n.skip = tchi_cuda_skips(list);
    return n;
}

/* What goes into block[1]. */
template <typename real>
static __device__ inline tchi_cuda_vec4<real> filter_four(const gather_numbers<real> &n, tch_filter filter,
                                                          const tchi_cuda_vec4<real> &g, tchi_cuda_vec4<real> &s)
{
    tchi_cuda_vec4<real> out;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        s.v[k] = fma(n.keep, s.v[k], n.take * g.v[k]);
        out.v[k] = filter == TCH_FILTER_NESTEROV ? fma(n.keep, s.v[k], n.take * g.v[k]) : n.corrected * s.v[k];
    }
    return out;
}

template <typename real, tchi_cuda_access_path path>
static __device__ inline void zero_blocks(const tchi_cuda_chunk_ctx<real, path> &ctx, tch_filter filter)
{
    tchi_cuda_vec4s<real> zeros = {};
    if (tchi_cuda_chunk_has(ctx, TCHI_CUDA_BLOCK_0)) {
        tchi_cuda_put_all(ctx, TCHI_CUDA_BLOCK_0, zeros);
    }
    if (filter != TCH_FILTER_NONE && tchi_cuda_chunk_has(ctx, TCHI_CUDA_BLOCK_1)) {
        tchi_cuda_put_all(ctx, TCHI_CUDA_BLOCK_1, zeros);
    }
}

template <typename real, tchi_cuda_access_path path>
static __device__ inline void add_decay(const tchi_cuda_chunk_ctx<real, path> &ctx, real l2, tchi_cuda_vec4s<real> &p,
                                        tchi_cuda_vec4s<real> &g)
{
    tchi_cuda_unpack_param(ctx, p);
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            g.at[s].v[k] = fma(l2, p.at[s].v[k], g.at[s].v[k]);
        }
    }
}

#endif
