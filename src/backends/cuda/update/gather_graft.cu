/* Gather and graft in one pass, as Shampoo does them in most of its steps: a gradient is read once, and neither it nor
 * what the filter makes of it is read again for the norm. The same formulas in the same order, so the same bits.
 *
 *     g, m and block[0], block[1]                             // see blocks.cu
 *     v and |d|                                               // see graft.cu
 *     largest[block], filtered[block] = the most bits of |g| and of |f|
 *
 *     block[0], block[1] = fp16(2^i g), fp16(2^j f)           // gather_fp16, once those are known
 */
#include "backends/cuda/matrix/narrow.h"
#include "backends/cuda/product/two_sided/two_sided.h"
#include "gather.cuh"
#include "graft.cuh"

typedef struct gather_graft_rules {
    tch_filter filter;
    int l2;
    tch_graft kind;
    double *partial;              /* of the launch's chunks */
    uint32_t *largest, *filtered; /* or nothing */
} gather_graft_rules;

template <typename real> struct gather_graft_numbers {
    gather_numbers<real> gather;
    graft_numbers<real> graft;
};

template <typename real, tchi_cuda_access_path path>
static __device__ inline void store_gathered(const tchi_cuda_chunk_ctx<real, path> &ctx, tchi_cuda_slot slot,
                                             real *tile, tchi_cuda_vec4s<real> x)
{
    if (tchi_cuda_chunk_has(ctx, slot)) {
        tchi_cuda_put_block(ctx, slot, tile, x);
    }
}

/* What there is of the two: m and f, then v and d, which takes f's place. */
template <typename real, tchi_cuda_access_path path>
static __device__ inline double
filter_and_graft(const tchi_cuda_chunk_ctx<real, path> &ctx, const gather_graft_rules &rules,
                 const gather_graft_numbers<real> &numbers, const tchi_cuda_vec4s<real> &g, tchi_cuda_vec4s<real> &m,
                 tchi_cuda_vec4s<real> &v, real *tile, warp_maxima &of_f)
{
    tchi_cuda_vec4s<real> f = g;
    if (rules.filter != TCH_FILTER_NONE) {
#pragma unroll
        for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
            f.at[s] = filter_four(numbers.gather, rules.filter, g.at[s], m.at[s]);
        }
        tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_0, m);
        note_largest(f, of_f);
        store_gathered(ctx, TCHI_CUDA_BLOCK_1, tile, f);
    }
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        graft_four(numbers.graft, g.at[s], v.at[s], f.at[s]);
    }
    tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_1, v);
    return sum_squares(ctx, f);
}

/* What the warps of a block have found. The sum is that of tchi_cuda_block_sum, for one thread: the other warps are
 * done after the barrier. */
static __device__ inline void bring_together(const gather_graft_rules &rules, int block, double sum,
                                             const warp_maxima (&of_warps)[2], double *sums)
{
    const int warps = TCHI_CUDA_UPDATE_THREADS / 32;
    sum = tchi_cuda_warp_sum(sum);
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        return;
    }
    sum = tchi_cuda_warp_sum((int)threadIdx.x < warps ? sums[threadIdx.x] : 0.0);
    if (threadIdx.x == 0) {
        rules.partial[blockIdx.x] = sum;
        if (rules.largest != nullptr) {
            keep_largest(of_warps[0], rules.largest + block);
        }
        if (rules.largest != nullptr && rules.filter != TCH_FILTER_NONE) {
            keep_largest(of_warps[1], rules.filtered + block);
        }
    }
}

template <typename real, tchi_cuda_access_path path>
static __device__ inline void gather_graft_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx,
                                                 const gather_graft_rules &rules, gather_graft_numbers<real> &numbers,
                                                 real *tile, double *sums, warp_maxima (&of_warps)[2])
{
    tchi_cuda_vec4s<real> p = {};
    tchi_cuda_vec4s<real> g = tchi_cuda_fetch(ctx, TCHI_CUDA_GRAD);
    tchi_cuda_vec4s<real> m = tchi_cuda_fetch_if(rules.filter != TCH_FILTER_NONE, ctx, TCHI_CUDA_STATE_0);
    tchi_cuda_vec4s<real> v = tchi_cuda_fetch(ctx, TCHI_CUDA_STATE_1);
    if (rules.l2) {
        p = tchi_cuda_fetch_param(ctx);
    }
    if (threadIdx.x == 0) {
        numbers.gather = gather_numbers_of<real>(ctx.list, ctx.rect, rules.filter);
        numbers.graft = graft_numbers_of<real>(ctx.list, ctx.rect, rules.kind);
    }
    __syncthreads();
    if (numbers.gather.skip) {
        zero_blocks(ctx, rules.filter);
        return;
    }
    tchi_cuda_unpack_grad(ctx, numbers.gather.divisor, g);
    if (rules.l2) {
        add_decay(ctx, numbers.gather.l2, p, g);
    }
    note_largest(g, of_warps[0]);
    store_gathered(ctx, TCHI_CUDA_BLOCK_0, tile, g);
    double sum = filter_and_graft(ctx, rules, numbers, g, m, v, tile, of_warps[1]);
    bring_together(rules, ctx.rect.block_index, sum, of_warps, sums);
}

/* In float32, for an element: 12 bytes read, 16 written, 12 operations. One after the other they read 20 and write
 * 16. */
template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_resident<real>())
    gather_graft_kernel(const __grid_constant__ tchi_cuda_rects list, gather_graft_rules rules)
{
    __shared__ gather_graft_numbers<real> numbers;
    __shared__ real tile[TCHI_CUDA_TILE];
    __shared__ double sums[TCHI_CUDA_UPDATE_THREADS / 32];
    __shared__ warp_maxima of_warps[2];
    tchi_cuda_with_chunk<real, true>(
        list, [&](const auto &ctx) { gather_graft_chunk(ctx, rules, numbers, tile, sums, of_warps); });
}

#define EVEN_RESIDENT 4

/* The same where all chunks are alike and there is no weight decay in gradients: with fewer registers more blocks
 * fit. */
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, EVEN_RESIDENT)
    gather_graft_even_kernel(const __grid_constant__ tchi_cuda_rects list, gather_graft_rules rules)
{
    __shared__ gather_graft_numbers<float> numbers;
    __shared__ float tile[TCHI_CUDA_TILE];
    __shared__ double sums[TCHI_CUDA_UPDATE_THREADS / 32];
    __shared__ warp_maxima of_warps[2];
    rules.l2 = 0;
    tchi_cuda_with_even_chunk<TCHI_CUDA_PLAIN>(
        list, [&](const auto &ctx) { gather_graft_chunk(ctx, rules, numbers, tile, sums, of_warps); });
}

static tch_status gather_and_graft(tchi_cuda_state *s, const tch_update *update, tchi_cuda_use use,
                                   const tch_gathering *how, uint32_t *largest, uint32_t *filtered)
{
    const tch_filter filter = how->filter;
    const int32_t l2 = how->l2;
    gather_graft_rules rules = {filter, l2, how->graft, (double *)how->scratch, largest, filtered};
    tchi_cuda_rects list;
    int64_t next = 0;
    int32_t chunks;
    if (largest != NULL && update->count > 0) {
        TCHI_CUDA_PASS(clear_largest(s, update, largest, "gather_graft"));
        TCHI_CUDA_PASS(filter == TCH_FILTER_NONE ? TCH_OK : clear_largest(s, update, filtered, "gather_graft"));
    }
    while ((chunks = tchi_cuda_pack(update, TCHI_CUDA_LOG_CHUNK, use, &next, &list)) > 0) {
        bool even = list.even && list.plain && !l2;
        auto kernel = update->real == TCH_SCALAR_F64 ? gather_graft_kernel<double>
                      : even                         ? gather_graft_even_kernel
                                                     : gather_graft_kernel<float>;
        kernel<<<chunks, TCHI_CUDA_UPDATE_THREADS, 0, s->stream>>>(list, rules);
        TCHI_CUDA_PASS(tchi_cuda_launched(s, "gather_graft"));
        rules.partial += chunks;
    }
    return tchi_cuda_graft_norms(s, update, (double *)how->scratch, how->norms);
}

/* --- blocks of float16 ------------------------------------------------------------------------------------------- */

typedef struct gather_fp16_rules {
    tch_filter filter;
    int l2;
    const uint32_t *largest, *filtered;
} gather_fp16_rules;

typedef struct gather_fp16_numbers {
    gather_numbers<float> gather;
    float scale[2];
} gather_fp16_numbers;

template <tchi_cuda_access_path path>
static __device__ inline void put_scaled(const tchi_cuda_chunk_ctx<float, path> &ctx, tchi_cuda_slot slot, float *tile,
                                         float scale, tchi_cuda_vec4s<float> x)
{
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            x.at[s].v[k] *= scale;
        }
    }
    tchi_cuda_put_block(ctx, slot, tile, x);
}

/* What filter_four has made of m, from the m it left. */
static __device__ inline tchi_cuda_vec4<float> filtered_four(const gather_numbers<float> &n, tch_filter filter,
                                                             const tchi_cuda_vec4<float> &g,
                                                             const tchi_cuda_vec4<float> &m)
{
    tchi_cuda_vec4<float> out;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        out.v[k] = filter == TCH_FILTER_NESTEROV ? fma(n.keep, m.v[k], n.take * g.v[k]) : n.corrected * m.v[k];
    }
    return out;
}

template <tchi_cuda_access_path path>
static __device__ inline void gather_fp16_chunk(const tchi_cuda_chunk_ctx<float, path> &ctx,
                                                const gather_fp16_rules &rules, gather_fp16_numbers &numbers,
                                                float *tile)
{
    bool has_g = tchi_cuda_chunk_has(ctx, TCHI_CUDA_BLOCK_0);
    bool has_f = rules.filter != TCH_FILTER_NONE && tchi_cuda_chunk_has(ctx, TCHI_CUDA_BLOCK_1);
    bool reads_g = has_g || rules.filter == TCH_FILTER_NESTEROV;
    tchi_cuda_vec4s<float> p = {};
    tchi_cuda_vec4s<float> g = tchi_cuda_fetch_if(reads_g, ctx, TCHI_CUDA_GRAD);
    tchi_cuda_vec4s<float> m = tchi_cuda_fetch_if(has_f, ctx, TCHI_CUDA_STATE_0);
    if (rules.l2 && reads_g) {
        p = tchi_cuda_fetch_param(ctx);
    }
    if (threadIdx.x == 0) {
        numbers.gather = gather_numbers_of<float>(ctx.list, ctx.rect, rules.filter);
        numbers.scale[0] = tchi_narrow_scale(rules.largest[ctx.rect.block_index]);
        numbers.scale[1] = has_f ? tchi_narrow_scale(rules.filtered[ctx.rect.block_index]) : 1.0f;
    }
    __syncthreads();
    if (numbers.gather.skip) {
        zero_blocks(ctx, rules.filter);
        return;
    }
    if (reads_g) {
        tchi_cuda_unpack_grad(ctx, numbers.gather.divisor, g);
        if (rules.l2) {
            add_decay(ctx, numbers.gather.l2, p, g);
        }
    }
    if (has_g) {
        put_scaled(ctx, TCHI_CUDA_BLOCK_0, tile, numbers.scale[0], g);
    }
    if (has_f) {
#pragma unroll
        for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
            m.at[s] = filtered_four(numbers.gather, rules.filter, g.at[s], m.at[s]);
        }
        put_scaled(ctx, TCHI_CUDA_BLOCK_1, tile, numbers.scale[1], m);
    }
}

/* For an element 8 bytes read and 4 written. With blocks of float32 gather_graft writes 8 more, which copies in float16
 * read again: 40 bytes in all, and so 32. */
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_resident<float>())
    gather_fp16_kernel(const __grid_constant__ tchi_cuda_rects list, gather_fp16_rules rules)
{
    __shared__ gather_fp16_numbers numbers;
    __shared__ float tile[TCHI_CUDA_TILE];
    tchi_cuda_with_chunk<float, true>(list, [&](const auto &ctx) { gather_fp16_chunk(ctx, rules, numbers, tile); });
}

static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, TCHI_CUDA_EVEN_RESIDENT)
    gather_fp16_even_kernel(const __grid_constant__ tchi_cuda_rects list, gather_fp16_rules rules)
{
    __shared__ gather_fp16_numbers numbers;
    __shared__ float tile[TCHI_CUDA_TILE];
    rules.l2 = 0;
    tchi_cuda_with_even_chunk<TCHI_CUDA_HALF>(list,
                                              [&](const auto &ctx) { gather_fp16_chunk(ctx, rules, numbers, tile); });
}

/* After the others, with what they noted. Blocks go to the front of their buffers. */
static tch_status gather_fp16(const tchi_cuda_state *s, const tch_update *update, const tch_gathering *how)
{
    const gather_fp16_rules rules = {how->filter, how->l2, how->notes[0], how->notes[1]};
    tch_update fp16 = *update;
    tchi_cuda_rects list;
    int64_t next = 0;
    int32_t chunks;
    fp16.block_type = TCH_SCALAR_F16;
    while ((chunks = tchi_cuda_pack_fp16(&fp16, TCHI_CUDA_LOG_CHUNK, how->sides->buffers, &next, &list)) > 0) {
        auto kernel = list.even && list.fp16 && !how->l2 ? gather_fp16_even_kernel : gather_fp16_kernel;
        kernel<<<chunks, TCHI_CUDA_UPDATE_THREADS, 0, s->stream>>>(list, rules);
        TCHI_CUDA_PASS(tchi_cuda_launched(s, "gather_fp16"));
    }
    return TCH_OK;
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

/* The grafted kinds whose v is kept. */
static bool has_squares(tch_graft kind)
{
    return kind != TCH_GRAFT_NONE && kind != TCH_GRAFT_SGD;
}

/* One pass, or gather and then graft. */
static tch_status gather_blocks(tchi_cuda_state *s, const tch_update *update, tchi_cuda_use use,
                                const tch_gathering *how, uint32_t *const notes[2])
{
    if (has_squares(how->graft) && how->norms != NULL) {
        return gather_and_graft(s, update, use, how, notes[0], notes[1]);
    }
    TCHI_CUDA_PASS(tchi_cuda_gather_plain(s, update, use, how->filter, how->l2, notes[0], notes[1]));
    return how->graft == TCH_GRAFT_NONE ? TCH_OK : tchi_cuda_graft(s, update, how->graft, how->norms, how->scratch);
}

/* Both passes over blocks of float16 read gradients and states; the first writes no block. */
tch_status tchi_cuda_gather(void *state, const tch_update *update, const tch_gathering *how, tch_scalar *chosen)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    const bool has_sides = how->sides != NULL;
    const bool one_pass = how->graft == TCH_GRAFT_NONE || (has_squares(how->graft) && how->norms != NULL);
    const bool fp16 = has_sides && one_pass && tchi_cuda_fp16_sides_supported(s, how->sides);
    uint32_t *const notes[2] = {has_sides ? how->notes[0] : NULL, has_sides ? how->notes[1] : NULL};
    if (chosen != NULL) {
        *chosen = fp16 ? TCH_SCALAR_F16 : update->block_type;
    }
    if (!fp16) {
        return gather_blocks(s, update, TCHI_CUDA_BLOCKS, how, notes);
    }
    TCHI_CUDA_PASS(gather_blocks(s, update, TCHI_CUDA_NO_BLOCKS, how, notes));
    return gather_fp16(s, update, how);
}
