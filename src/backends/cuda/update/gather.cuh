/* The parts of reading gradients into blocks: see blocks.cu. */
#ifndef TCHI_CUDA_GATHER_CUH
#define TCHI_CUDA_GATHER_CUH

#include "updates.cuh"

/* Gradients into blocks of block_type; largest[block_index] and filtered[block_index] become the bits, as float32, of
 * the largest |g| and |f| of a block, NaN above all others, where they are not NULL. */
tch_status tchi_cuda_gather_plain(tchi_cuda_state *state, const tch_update *update, tchi_cuda_use use,
                                  tch_filter filter, int32_t l2, uint32_t *largest, uint32_t *filtered);

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

/* --- the largest elements of blocks, which scale those of float16 ------------------------------------------------ */

/* The most bits of a thread's numbers, and then of each warp's: one thread brings those of a block together, since a
 * warp's atomics to the one place for a matrix would wait for each other. */
typedef uint32_t warp_maxima[TCHI_CUDA_UPDATE_THREADS / 32];

/* Zeros beyond the edge of a rectangle do not count. */
template <typename real>
static __device__ inline void note_largest(const tchi_cuda_vec4s<real> &x, warp_maxima &of_warps)
{
    uint32_t most = 0;
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            most = max(most, __float_as_uint((float)x.at[s].v[k]) & 0x7FFFFFFFu);
        }
    }
    most = tchi_cuda_warp_max(most);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = most;
    }
}

static __device__ inline void keep_largest(const warp_maxima &of_warps, uint32_t *largest)
{
    uint32_t most = of_warps[0];
#pragma unroll
    for (int w = 1; w < TCHI_CUDA_UPDATE_THREADS / 32; w++) {
        most = max(most, of_warps[w]);
    }
    atomicMax(largest, most);
}

static tch_status clear_largest(const tchi_cuda_state *state, const tch_update *update, uint32_t *largest,
                                const char *name)
{
    int64_t blocks = 0;
    for (int64_t k = 0; k < update->count; k++) {
        blocks = update->rects[k].block_index >= blocks ? update->rects[k].block_index + 1 : blocks;
    }
    return tchi_cuda_check(cudaMemsetAsync(largest, 0, (size_t)blocks * sizeof *largest, state->stream), name);
}

#endif
