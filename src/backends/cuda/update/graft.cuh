/* The parts of grafting: see graft.cu. */
#ifndef TCHI_CUDA_GRAFT_CUH
#define TCHI_CUDA_GRAFT_CUH

#include "updates.cuh"

/* d from g in block[0], f in block[1] (or block[0] where that is NULL) and v in state[1]: the norms of d or, where
 * those are NULL, d in place of f. */
tch_status tchi_cuda_graft(tchi_cuda_state *state, const tch_update *update, tch_graft kind, double *norms,
                           void *scratch);

/* norms[block_index] of the chunks' sums in `partial`, in the order of their launches. */
tch_status tchi_cuda_graft_norms(const tchi_cuda_state *state, const tch_update *update, const double *partial,
                                 double *norms);

template <typename real> struct graft_numbers {
    real keep, take; /* v = keep v + take g^2 */
    real root, eps;  /* d = f / (root sqrt(v) + eps) */
    int skip;
};

template <typename real>
static __device__ graft_numbers<real> graft_numbers_of(const tchi_cuda_rects &list, const tchi_cuda_rect &rect,
                                                       tch_graft kind)
{
    double beta = list.hyper->graft_beta2;
    graft_numbers<real> n;
    n.keep = kind == TCH_GRAFT_ADAGRAD ? (real)1 : (real)beta;
    n.take = kind == TCH_GRAFT_ADAGRAD ? (real)1 : (real)(1.0 - beta);
    n.root = kind == TCH_GRAFT_ADAM ? (real)(1.0 / sqrt(rect.clock->graft)) : (real)1;
    n.eps = (real)list.hyper->graft_eps;
    n.skip = tchi_cuda_skips(list);
    return n;
}

/* f becomes d. */
template <typename real>
static __device__ inline void graft_four(const graft_numbers<real> &n, const tchi_cuda_vec4<real> &g,
                                         tchi_cuda_vec4<real> &v, tchi_cuda_vec4<real> &f)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        v.v[k] = fma(n.keep, v.v[k], n.take * g.v[k] * g.v[k]);
        f.v[k] = f.v[k] / fma(n.root, sqrt(v.v[k]), n.eps);
    }
}

/* Beyond the edge of a rectangle d is 0 / 0 where graft_eps is 0: those are left out. */
template <typename real, tchi_cuda_access_path path>
static __device__ inline double sum_squares(const tchi_cuda_chunk_ctx<real, path> &ctx, const tchi_cuda_vec4s<real> &d)
{
    double sum = 0;
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        int count = tchi_cuda_chunk_place(ctx, TCHI_CUDA_STATE_1, s).count;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sum = k < count ? fma((double)d.at[s].v[k], (double)d.at[s].v[k], sum) : sum;
        }
    }
    return sum;
}

#endif
