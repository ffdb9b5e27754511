/* What second-order optimizers do between parameters and blocks: gradients go into blocks, directions come out of them,
 * and SOAP's Adam works inside them. All of it is limited by memory; a chunk of a transposed block passes through
 * shared memory, and everything else happens in the order of the parameter.
 *
 *     g = grad / grad_scale + (l2 ? weight_decay * p : 0);    // gather
 *     block[0] = g;
 *     m = beta1 * m + (1 - beta1) * g;                        // with a filter
 *     block[1] = nesterov ? beta1 * m + (1 - beta1) * g : m / correction1;
 *
 *     v = beta2 * v + (1 - beta2) * block[0] * block[0];      // rotated_adam
 *     block[1] *= sqrt(correction2) / correction1 / (sqrt(v) + eps);
 */
#include "gather.cuh"

/* --- from gradients to blocks ------------------------------------------------------------------------------------ */

typedef struct gather_rules {
    tch_filter filter;
    int l2;
    uint32_t *largest, *filtered; /* or nothing */
} gather_rules;

/* All threads of the block. */
static __device__ inline void keep_both(const gather_rules &rules, int block, const warp_maxima (&of_warps)[2])
{
    __syncthreads();
    if (threadIdx.x == 0) {
        keep_largest(of_warps[0], rules.largest + block);
        if (rules.filter != TCH_FILTER_NONE) {
            keep_largest(of_warps[1], rules.filtered + block);
        }
    }
}

template <typename real, tchi_cuda_access_path path>
static __device__ inline void gather_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, const gather_rules &rules,
                                           gather_numbers<real> &numbers, real *tile, warp_maxima (&of_warps)[2])
{
    tchi_cuda_vec4s<real> p = {};
    tchi_cuda_vec4s<real> g = tchi_cuda_fetch(ctx, TCHI_CUDA_GRAD);
    tchi_cuda_vec4s<real> state = tchi_cuda_fetch_if(rules.filter != TCH_FILTER_NONE, ctx, TCHI_CUDA_STATE_0);
    if (rules.l2) {
        p = tchi_cuda_fetch_param(ctx);
    }
    if (threadIdx.x == 0) {
        numbers = gather_numbers_of<real>(ctx.list, ctx.rect, rules.filter);
    }
    __syncthreads();
    if (numbers.skip) {
        zero_blocks(ctx, rules.filter);
        return;
    }
    tchi_cuda_unpack_grad(ctx, numbers.divisor, g);
    if (rules.l2) {
        add_decay(ctx, numbers.l2, p, g);
    }
    if (rules.largest != nullptr) {
        note_largest(g, of_warps[0]);
    }
    if (tchi_cuda_chunk_has(ctx, TCHI_CUDA_BLOCK_0)) {
        tchi_cuda_put_block(ctx, TCHI_CUDA_BLOCK_0, tile, g);
    }
    if (rules.filter != TCH_FILTER_NONE) {
#pragma unroll
        for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
            g.at[s] = filter_four(numbers, rules.filter, g.at[s], state.at[s]);
        }
        tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_0, state);
        if (rules.largest != nullptr) {
            note_largest(g, of_warps[1]);
        }
        if (tchi_cuda_chunk_has(ctx, TCHI_CUDA_BLOCK_1)) {
            tchi_cuda_put_block(ctx, TCHI_CUDA_BLOCK_1, tile, g);
        }
    }
    if (rules.largest != nullptr) {
        keep_both(rules, ctx.rect.block_index, of_warps);
    }
}

/* In float32, for an element: 4 bytes read and 4 written; with a filter 8 and 12, and 4 operations. */
template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_resident<real>())
    gather_kernel(const __grid_constant__ tchi_cuda_rects list, gather_rules rules)
{
    __shared__ gather_numbers<real> numbers;
    __shared__ real tile[TCHI_CUDA_TILE];
    __shared__ warp_maxima of_warps[2];
    tchi_cuda_with_chunk<real, true>(list, [&](const auto &ctx) { gather_chunk(ctx, rules, numbers, tile, of_warps); });
}

/* The same where all chunks are alike and there is no weight decay in gradients, as in Muon's step: 8 bytes read and 6
 * written. */
template <tchi_cuda_access_path path>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, TCHI_CUDA_EVEN_RESIDENT)
    gather_even_kernel(const __grid_constant__ tchi_cuda_rects list, gather_rules rules)
{
    __shared__ gather_numbers<float> numbers;
    __shared__ float tile[TCHI_CUDA_TILE];
    __shared__ warp_maxima of_warps[2];
    rules.l2 = 0;
    tchi_cuda_with_even_chunk<path>(list, [&](const auto &ctx) { gather_chunk(ctx, rules, numbers, tile, of_warps); });
}

tch_status tchi_cuda_gather_plain(tchi_cuda_state *state, const tch_update *update, tchi_cuda_use use,
                                  tch_filter filter, int32_t l2, uint32_t *largest, uint32_t *filtered)
{
    if (largest != NULL && update->count > 0) {
        TCHI_CUDA_PASS(clear_largest(state, update, largest, "gather"));
        TCHI_CUDA_PASS(filter == TCH_FILTER_NONE ? TCH_OK : clear_largest(state, update, filtered, "gather"));
    }
    return tchi_cuda_launch_update<gather_rules>(state, update, use, "gather",
                                                 {gather_kernel<double>, gather_kernel<float>,
                                                  l2 ? NULL : gather_even_kernel<TCHI_CUDA_SHORT>,
                                                  l2 ? NULL : gather_even_kernel<TCHI_CUDA_PLAIN>},
                                                 {filter, l2, largest, filtered});
}

/* --- Adam inside blocks ------------------------------------------------------------------------------------------ */

template <typename real> struct rotated_numbers {
    real keep, take; /* v = keep v + take g^2 */
    real eps;
    real step; /* d = step d / (sqrt(v) + eps) */
    int skip;
};

template <typename real>
static __device__ rotated_numbers<real> rotated_numbers_of(const tchi_cuda_rects &list, const tchi_cuda_rect &rect)
{
    rotated_numbers<real> n;
    n.keep = (real)list.hyper->beta2;
    n.take = (real)(1.0 - list.hyper->beta2);
    n.eps = (real)list.hyper->eps;
    n.step = (real)(sqrt(rect.clock->correction2) / rect.clock->correction1);
    n.skip = tchi_cuda_skips(list);
    return n;
}

template <typename real>
static __device__ inline void rotated_four(const rotated_numbers<real> &n, const tchi_cuda_vec4<real> &g,
                                           tchi_cuda_vec4<real> &v, tchi_cuda_vec4<real> &d)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        v.v[k] = fma(n.keep, v.v[k], n.take * g.v[k] * g.v[k]);
        d.v[k] = n.step * d.v[k] / (sqrt(v.v[k]) + n.eps);
    }
}

template <typename real, tchi_cuda_access_path path>
static __device__ inline void rotated_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, rotated_numbers<real> &numbers,
                                            real *tile, warp_maxima &of_warps, uint32_t *largest)
{
    tchi_cuda_vec4s<real> g = tchi_cuda_fetch(ctx, TCHI_CUDA_BLOCK_0);
    tchi_cuda_vec4s<real> d = tchi_cuda_fetch(ctx, TCHI_CUDA_BLOCK_1);
    tchi_cuda_vec4s<real> v = tchi_cuda_fetch(ctx, TCHI_CUDA_STATE_1);
    if (threadIdx.x == 0) {
        numbers = rotated_numbers_of<real>(ctx.list, ctx.rect);
    }
    __syncthreads();
    if (numbers.skip) {
        return;
    }
    tchi_cuda_unpack_block(ctx, TCHI_CUDA_BLOCK_0, tile, g);
    tchi_cuda_unpack_block(ctx, TCHI_CUDA_BLOCK_1, tile, d);
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        rotated_four(numbers, g.at[s], v.at[s], d.at[s]);
    }
    tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_1, v);
    tchi_cuda_put_block(ctx, TCHI_CUDA_BLOCK_1, tile, d);
    if (largest == nullptr) {
        return;
    }
    note_largest(d, of_warps);
    __syncthreads();
    if (threadIdx.x == 0) {
        keep_largest(of_warps, largest + ctx.rect.block_index);
    }
}

/* In float32, for an element: 12 bytes read, 8 written, 8 operations. */
template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_resident<real>())
    rotated_adam_kernel(const __grid_constant__ tchi_cuda_rects list, uint32_t *largest)
{
    __shared__ rotated_numbers<real> numbers;
    __shared__ real tile[TCHI_CUDA_TILE];
    __shared__ warp_maxima of_warps;
    tchi_cuda_with_chunk<real, true>(list,
                                     [&](const auto &ctx) { rotated_chunk(ctx, numbers, tile, of_warps, largest); });
}

tch_status tchi_cuda_rotated_adam(void *state, const tch_update *update, uint32_t *notes)
{
    if (notes != NULL && update->count > 0) {
        TCHI_CUDA_PASS(clear_largest((const tchi_cuda_state *)state, update, notes, "rotated_adam"));
    }
    return tchi_cuda_launch_update<uint32_t *>(state, update, TCHI_CUDA_BLOCKS, "rotated_adam",
                                               {rotated_adam_kernel<double>, rotated_adam_kernel<float>, NULL}, notes);
}
