/* From gradients to blocks: gather, and grafting, the step of another optimizer: its norm or, with `replace`, the step
 * itself. Most of Shampoo's steps do both in one pass over the gradient, with the same formulas in the same order and
 * so bitwise-identically. Memory-bound.
 *
 *     g = grad / grad_scale + (l2 ? weight_decay * p : 0);    // gather
 *     block[0] = g;
 *     m = beta1 * m + (1 - beta1) * g;                        // with a filter
 *     block[1] = f = nesterov ? beta1 * m + (1 - beta1) * g : m / correction1;
 *     largest[block], filtered[block] = the most bits of |g| and of |f|
 *
 *     v = keep * v + take * g * g;                            // graft: beta2 and 1 - beta2; Adagrad: 1 and 1
 *     d = f / (root * sqrt(v) + eps);                         // root: 1, or 1 / sqrt(correction) for Adam; SGD: d = f
 *     norms[block] = sqrt(sum of d * d);
 *
 *     block[0], block[1] = fp16(2^i g), fp16(2^j f);          // gather_fp16, once largest and filtered are known
 *
 * A moment in bfloat16 or in codes is rounded as it is stored, but f is not: before gather_fp16, which then computes m
 * once more, it is not stored.
 *
 * Norms are summed in double in a fixed order: over a thread's elements, over its block of threads, and by one block
 * over the block's chunks, whose sums are in scratch. */
#include "backends/cuda/matrix/fp16_copy.h"
#include "backends/cuda/product/two_sided/two_sided.h"
#include "moments.cuh"
#include "norms.cuh"

typedef struct gather_rules {
    tch_filter filter;
    int l2;
    tch_graft kind;
    int replace;
    int stores;                   /* a rounded moment */
    double *partial;              /* of all chunks */
    uint32_t *largest, *filtered; /* or nothing */
} gather_rules;

template <typename real> struct gather_numbers {
    real divisor;    /* of gradients */
    real l2;         /* g = g + l2 p */
    real keep, take; /* m = keep m + take g */
    real corrected;  /* 1 / correction1 */
    float scale[2];  /* of blocks in float16 */
    int skip;
};

template <typename real> struct graft_numbers {
    real keep, take; /* v = keep v + take g^2 */
    real root, eps;  /* d = f / (root sqrt(v) + eps) */
    int skip;
};

template <typename real> struct gather_graft_numbers {
    gather_numbers<real> gather;
    graft_numbers<real> graft;
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

/* --- elements ---------------------------------------------------------------------------------------------------- */

/* f, from m as it is by now. */
template <typename real>
static __device__ inline real filtered(const gather_numbers<real> &n, tch_filter filter, real g, real m)
{
    return filter == TCH_FILTER_NESTEROV ? fma(n.keep, m, n.take * g) : n.corrected * m;
}

/* Updates v, and replaces f by d. */
template <typename real>
static __device__ inline void graft_all(const graft_numbers<real> &n, const tchi_cuda_vec4s<real> &g,
                                        tchi_cuda_vec4s<real> &v, tchi_cuda_vec4s<real> &f)
{
#pragma unroll
    for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
        real *square = &v.at[k / 4].v[k % 4], *d = &f.at[k / 4].v[k % 4];
        *square = fma(n.keep, *square, n.take * g.at[k / 4].v[k % 4] * g.at[k / 4].v[k % 4]);
        *d = *d / fma(n.root, sqrt(*square), n.eps);
    }
}

/* Skips elements beyond the rectangle, where d is 0 / 0 if graft_eps is 0. */
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

/* g from the fetched gradient and, with l2, parameter. */
template <typename real, tchi_cuda_access_path path>
static __device__ inline void unpack_decayed(const tchi_cuda_chunk_ctx<real, path> &ctx, const gather_numbers<real> &n,
                                             int l2, tchi_cuda_vec4s<real> &p, tchi_cuda_vec4s<real> &g)
{
    tchi_cuda_unpack_grad(ctx, n.divisor, g);
    if (l2) {
        tchi_cuda_unpack_param(ctx, p);
#pragma unroll
        for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
            g.at[k / 4].v[k % 4] = fma(n.l2, p.at[k / 4].v[k % 4], g.at[k / 4].v[k % 4]);
        }
    }
}

template <typename real, tchi_cuda_access_path path>
static __device__ inline void put_if_there(const tchi_cuda_chunk_ctx<real, path> &ctx, tchi_cuda_slot slot, real *tile,
                                           const tchi_cuda_vec4s<real> &x)
{
    if (tchi_cuda_chunk_has(ctx, slot)) {
        tchi_cuda_put_block(ctx, slot, tile, x);
    }
}

/* --- one pass ---------------------------------------------------------------------------------------------------- */

template <typename real> struct gather_memory {
    gather_graft_numbers<real> numbers;
    real tile[TCHI_CUDA_TILE];
    double sums[TCHI_CUDA_UPDATE_THREADS / 32];
    warp_maxima of_warps[2]; /* of g and of f */
};

/* Combines the warps' results. The sum is that of tchi_cuda_block_sum, for one thread: the other warps exit after the
 * barrier. */
template <bool grafts, typename memory>
static __device__ inline void finish_block(const gather_rules &rules, int64_t chunk, int block, double sum,
                                           memory &shared)
{
    const int warps = TCHI_CUDA_UPDATE_THREADS / 32;
    if (!grafts && rules.largest == nullptr) {
        return;
    }
    if (grafts) {
        sum = tchi_cuda_warp_sum(sum);
        if (threadIdx.x % 32 == 0) {
            shared.sums[threadIdx.x / 32] = sum;
        }
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        return;
    }
    if (grafts) {
        sum = tchi_cuda_warp_sum((int)threadIdx.x < warps ? shared.sums[threadIdx.x] : 0.0);
    }
    if (threadIdx.x == 0) {
        if (grafts) {
            rules.partial[chunk] = sum;
        }
        if (rules.largest != nullptr) {
            keep_largest(shared.of_warps[0], rules.largest + block);
        }
        if (rules.largest != nullptr && rules.filter != TCH_FILTER_NONE) {
            keep_largest(shared.of_warps[1], rules.filtered + block);
        }
    }
}

template <bool grafts, tch_moments kept, typename real, tchi_cuda_access_path path>
static __device__ inline void gather_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, const gather_rules &rules,
                                           gather_memory<real> &shared)
{
    const bool filters = rules.filter != TCH_FILTER_NONE;
    const gather_numbers<real> &numbers = shared.numbers.gather;
    tchi_cuda_vec4s<real> p = {}, m = {}, v = {};
    tchi_cuda_vec4s<real> g = tchi_cuda_fetch(ctx, TCHI_CUDA_GRAD);
    if (filters) {
        m = tchi_cuda_fetch_moment<kept>(ctx, 0);
    }
    if (grafts) {
        v = tchi_cuda_fetch(ctx, TCHI_CUDA_STATE_1);
    }
    if (rules.l2) {
        p = tchi_cuda_fetch_param(ctx);
    }
    if (threadIdx.x == 0) {
        shared.numbers.gather = gather_numbers_of<real>(ctx.list, ctx.rect, rules.filter);
        if (grafts) {
            shared.numbers.graft = graft_numbers_of<real>(ctx.list, ctx.rect, rules.kind);
        }
    }
    __syncthreads();
    if (numbers.skip) {
        zero_blocks(ctx, rules.filter);
        return;
    }
    unpack_decayed(ctx, numbers, rules.l2, p, g);
    if (rules.largest != nullptr) {
        note_largest(g, shared.of_warps[0]);
    }
    put_if_there(ctx, TCHI_CUDA_BLOCK_0, shared.tile, g);
    tchi_cuda_vec4s<real> f = g;
    if (filters) {
        tchi_cuda_unpack_moment<kept>(0, m);
        const tchi_cuda_vec4s<real> was = m;
#pragma unroll
        for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
            real *moment = &m.at[k / 4].v[k % 4];
            *moment = fma(numbers.keep, *moment, numbers.take * g.at[k / 4].v[k % 4]);
            f.at[k / 4].v[k % 4] = filtered(numbers, rules.filter, g.at[k / 4].v[k % 4], *moment);
        }
        if (kept == TCH_MOMENTS_REAL || rules.stores) {
            tchi_cuda_put_moments<TCHI_CODE_SGD, kept>(ctx, m, m, was);
        }
        if (rules.largest != nullptr) {
            note_largest(f, shared.of_warps[1]);
        }
        put_if_there(ctx, TCHI_CUDA_BLOCK_1, shared.tile, f);
    }
    double sum = 0;
    if (grafts) {
        graft_all(shared.numbers.graft, g, v, f);
        tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_1, v);
        sum = sum_squares(ctx, f);
    }
    finish_block<grafts>(rules, ctx.list.before + blockIdx.x, ctx.rect.block_index, sum, shared);
}

/* Bytes per float32 element: 4 read and 4 written, with a filter 8 and 12; grafting with it 12 and 16, vs 20 and 16 in
 * two passes. */
template <typename real, bool grafts, tch_moments kept>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_moment_resident<real, kept>())
    gather_kernel(const __grid_constant__ tchi_cuda_rects list, gather_rules rules)
{
    __shared__ gather_memory<real> shared;
    tchi_cuda_with_chunk<real, true>(list, [&](const auto &ctx) { gather_chunk<grafts, kept>(ctx, rules, shared); });
}

/* The same if all chunks are full and aligned and gradients have no weight decay: fewer registers, more blocks. */
template <tchi_cuda_access_path path, bool grafts, tch_moments kept>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS,
                                         grafts || kept != TCH_MOMENTS_REAL ? 4 : TCHI_CUDA_EVEN_RESIDENT)
    gather_even_kernel(const __grid_constant__ tchi_cuda_rects list, gather_rules rules)
{
    __shared__ gather_memory<float> shared;
    rules.l2 = 0;
    tchi_cuda_with_even_chunk<path>(list, [&](const auto &ctx) { gather_chunk<grafts, kept>(ctx, rules, shared); });
}

template <bool grafts, tch_moments kept>
static tch_status launch_kept(tchi_cuda_state *s, const tch_update *update, tchi_cuda_use use,
                              const gather_rules &rules)
{
    const char *name = grafts ? "gather_graft" : "gather";
    tchi_cuda_update_kernels<gather_rules> kernels = {gather_kernel<double, grafts, TCH_MOMENTS_REAL>,
                                                      gather_kernel<float, grafts, kept>};
    if (!rules.l2) {
        kernels.even_f32 = gather_even_kernel<TCHI_CUDA_PLAIN, grafts, kept>;
        if constexpr (!grafts) {
            kernels.even_bf16 = gather_even_kernel<TCHI_CUDA_SHORT, false, kept>;
        }
    }
    TCHI_TRY(clear_largest(s, update, rules.largest, name));
    TCHI_TRY(clear_largest(s, update, rules.filter == TCH_FILTER_NONE ? NULL : rules.filtered, name));
    return tchi_cuda_launch_update<gather_rules>(s, update, use, name, kernels, rules);
}

template <bool grafts>
static tch_status launch_gather(tchi_cuda_state *s, const tch_update *update, tchi_cuda_use use,
                                const gather_rules &rules)
{
    switch (rules.filter == TCH_FILTER_NONE ? TCH_MOMENTS_REAL : update->moments) {
    case TCH_MOMENTS_BF16:
        return launch_kept<grafts, TCH_MOMENTS_BF16>(s, update, use, rules);
    case TCH_MOMENTS_CODES:
        return launch_kept<grafts, TCH_MOMENTS_CODES>(s, update, use, rules);
    default:
        return launch_kept<grafts, TCH_MOMENTS_REAL>(s, update, use, rules);
    }
}

/* --- blocks of float16 ------------------------------------------------------------------------------------------- */

template <tchi_cuda_access_path path>
static __device__ inline void put_scaled(const tchi_cuda_chunk_ctx<float, path> &ctx, tchi_cuda_slot slot, float *tile,
                                         float scale, tchi_cuda_vec4s<float> x)
{
#pragma unroll
    for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
        x.at[k / 4].v[k % 4] *= scale;
    }
    tchi_cuda_put_block(ctx, slot, tile, x);
}

template <tch_moments kept, tchi_cuda_access_path path>
static __device__ inline void gather_fp16_chunk(const tchi_cuda_chunk_ctx<float, path> &ctx, const gather_rules &rules,
                                                gather_numbers<float> &numbers, float *tile)
{
    bool has_g = tchi_cuda_chunk_has(ctx, TCHI_CUDA_BLOCK_0);
    bool filters = rules.filter != TCH_FILTER_NONE;
    bool has_f = filters && tchi_cuda_chunk_has(ctx, TCHI_CUDA_BLOCK_1);
    bool again = kept != TCH_MOMENTS_REAL && filters;
    bool reads_g = has_g || again || rules.filter == TCH_FILTER_NESTEROV;
    tchi_cuda_vec4s<float> p = {}, m = {};
    tchi_cuda_vec4s<float> g = tchi_cuda_fetch_if(reads_g, ctx, TCHI_CUDA_GRAD);
    if (has_f || again) {
        m = tchi_cuda_fetch_moment<kept>(ctx, 0);
    }
    if (rules.l2 && reads_g) {
        p = tchi_cuda_fetch_param(ctx);
    }
    if (threadIdx.x == 0) {
        numbers = gather_numbers_of<float>(ctx.list, ctx.rect, rules.filter);
        numbers.scale[0] = tchi_fp16_scale(rules.largest[ctx.rect.block_index]);
        numbers.scale[1] = has_f ? tchi_fp16_scale(rules.filtered[ctx.rect.block_index]) : 1.0f;
    }
    __syncthreads();
    if (numbers.skip) {
        zero_blocks(ctx, rules.filter);
        return;
    }
    if (reads_g) {
        unpack_decayed(ctx, numbers, rules.l2, p, g);
    }
    if (has_g) {
        put_scaled(ctx, TCHI_CUDA_BLOCK_0, tile, numbers.scale[0], g);
    }
    if (again) {
        tchi_cuda_unpack_moment<kept>(0, m);
        const tchi_cuda_vec4s<float> was = m;
#pragma unroll
        for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
            m.at[k / 4].v[k % 4] = fma(numbers.keep, m.at[k / 4].v[k % 4], numbers.take * g.at[k / 4].v[k % 4]);
        }
        tchi_cuda_put_moments<TCHI_CODE_SGD, kept>(ctx, m, m, was);
    }
    if (has_f) {
#pragma unroll
        for (int k = 0; k < 4 * TCHI_CUDA_STEPS; k++) {
            float *moment = &m.at[k / 4].v[k % 4];
            *moment = filtered(numbers, rules.filter, g.at[k / 4].v[k % 4], *moment);
        }
        put_scaled(ctx, TCHI_CUDA_BLOCK_1, tile, numbers.scale[1], m);
    }
}

/* After gather, with its notes. 8 bytes read and 4 written per element. With float32 blocks gather_graft writes 8 more,
 * which fp16 copies read again: 40 bytes in total, vs 32. */
template <tch_moments kept>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_moment_resident<float, kept>())
    gather_fp16_kernel(const __grid_constant__ tchi_cuda_rects list, gather_rules rules)
{
    __shared__ gather_numbers<float> numbers;
    __shared__ float tile[TCHI_CUDA_TILE];
    tchi_cuda_with_chunk<float, true>(list,
                                      [&](const auto &ctx) { gather_fp16_chunk<kept>(ctx, rules, numbers, tile); });
}

template <tch_moments kept>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS,
                                         kept == TCH_MOMENTS_REAL ? TCHI_CUDA_EVEN_RESIDENT : 4)
    gather_fp16_even_kernel(const __grid_constant__ tchi_cuda_rects list, gather_rules rules)
{
    __shared__ gather_numbers<float> numbers;
    __shared__ float tile[TCHI_CUDA_TILE];
    rules.l2 = 0;
    tchi_cuda_with_even_chunk<TCHI_CUDA_HALF>(
        list, [&](const auto &ctx) { gather_fp16_chunk<kept>(ctx, rules, numbers, tile); });
}

template <tch_moments kept>
static tch_status launch_fp16(tchi_cuda_state *s, const tch_update *update, const tch_gathering *how,
                              const gather_rules &rules)
{
    tch_update with_fp16 = *update;
    with_fp16.block_type = TCH_SCALAR_F16;
    tchi_cuda_update_kernels<gather_rules> kernels = {NULL, gather_fp16_kernel<kept>};
    kernels.even_fp16 = how->l2 ? NULL : gather_fp16_even_kernel<kept>;
    return tchi_cuda_launch_blocks<gather_rules>(s, &with_fp16, TCHI_CUDA_BLOCKS, how->sides->buffers, "gather_fp16",
                                                 kernels, rules);
}

/* --- grafting alone ---------------------------------------------------------------------------------------------- */

/* d from g in block[0] and f in block[1], or in block[0] where that is NULL. */
template <typename real, tchi_cuda_access_path path>
static __device__ inline void graft_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, const gather_rules &rules,
                                          graft_numbers<real> &numbers, real *tile, double *sums)
{
    bool direct = rules.kind == TCH_GRAFT_NONE || rules.kind == TCH_GRAFT_SGD; /* d = f */
    bool separate = tchi_cuda_chunk_has(ctx, TCHI_CUDA_BLOCK_1);
    tchi_cuda_slot slot = separate ? TCHI_CUDA_BLOCK_1 : TCHI_CUDA_BLOCK_0;
    tchi_cuda_vec4s<real> d = tchi_cuda_fetch(ctx, slot);
    tchi_cuda_vec4s<real> g = tchi_cuda_fetch_if(separate && !direct, ctx, TCHI_CUDA_BLOCK_0);
    tchi_cuda_vec4s<real> v = tchi_cuda_fetch_if(!direct, ctx, TCHI_CUDA_STATE_1);
    if (threadIdx.x == 0) {
        numbers = graft_numbers_of<real>(ctx.list, ctx.rect, rules.kind);
    }
    __syncthreads();
    if (numbers.skip) {
        return;
    }
    tchi_cuda_unpack_block(ctx, slot, tile, d);
    if (separate && !direct) {
        tchi_cuda_unpack_block(ctx, TCHI_CUDA_BLOCK_0, tile, g);
    }
    if (!direct) {
        graft_all(numbers, separate ? g : tchi_cuda_vec4s<real>(d), v, d);
        tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_1, v);
    }
    double sum = tchi_cuda_block_sum(sum_squares(ctx, d), (int)threadIdx.x, TCHI_CUDA_UPDATE_THREADS, sums);
    if (threadIdx.x == 0) {
        rules.partial[ctx.list.before + blockIdx.x] = sum;
    }
    if (rules.replace && !direct) {
        tchi_cuda_put_block(ctx, slot, tile, d);
    }
}

/* Bytes per float32 element: 12 read and 4 written, 4 more with `replace`; for SGD 4 read. */
template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_resident<real>())
    graft_kernel(const __grid_constant__ tchi_cuda_rects list, gather_rules rules)
{
    __shared__ graft_numbers<real> numbers;
    __shared__ real tile[TCHI_CUDA_TILE];
    __shared__ double sums[32];
    tchi_cuda_with_chunk<real, true>(list, [&](const auto &ctx) { graft_chunk(ctx, rules, numbers, tile, sums); });
}

/* Advances *rect past the rectangles of one block, and *chunk past their chunks. */
static norm_range next_range(const tch_update *update, int64_t *rect, int64_t *chunk)
{
    norm_range range = {*chunk, 0, update->rects[*rect].block_index};
    while (*rect < update->count && update->rects[*rect].block_index == range.block) {
        range.count += tchi_cuda_chunks_of(&update->rects[*rect], TCHI_CUDA_LOG_CHUNK, TCHI_CUDA_BLOCKS);
        ++*rect;
    }
    *chunk += range.count;
    return range;
}

/* norms[block_index] of the chunks' sums. */
static tch_status graft_norms(tchi_cuda_state *state, const tch_update *update, const double *partial, double *norms)
{
    norm_ranges ranges;
    int64_t rect = 0;
    int64_t chunk = 0;
    while (rect < update->count) {
        ranges.count = 0;
        while (rect < update->count && ranges.count < MOST_RANGES) {
            ranges.at[ranges.count++] = next_range(update, &rect, &chunk);
        }
        TCHI_TRY(launch_range_norms(state, ranges, update->skip, partial, norms));
    }
    return TCH_OK;
}

int64_t tchi_cuda_graft_scratch(int64_t elements, int64_t rects)
{
    return tchi_cuda_most_chunks(elements, rects, TCHI_CUDA_LOG_CHUNK) * (int64_t)sizeof(double);
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

/* One pass if the graft has a v and only its norm is needed, else gather and then graft. */
static tch_status gather_blocks(tchi_cuda_state *s, const tch_update *update, tchi_cuda_use use,
                                const tch_gathering *how, bool one_pass, const gather_rules &rules)
{
    if (how->graft == TCH_GRAFT_NONE) {
        return launch_gather<false>(s, update, use, rules);
    }
    if (one_pass) {
        TCHI_TRY(launch_gather<true>(s, update, use, rules));
    } else {
        TCHI_TRY(launch_gather<false>(s, update, use, rules));
        TCHI_TRY(tchi_cuda_launch_update<gather_rules>(s, update, TCHI_CUDA_BLOCKS, "graft",
                                                       {graft_kernel<double>, graft_kernel<float>}, rules));
    }
    return how->norms == NULL ? TCH_OK : graft_norms(s, update, rules.partial, how->norms);
}

/* With float16 blocks both passes read gradients and states; the first writes no block. */
tch_status tchi_cuda_gather(void *state, const tch_update *update, const tch_gathering *how, tch_scalar *chosen)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    const bool has_sides = how->sides != NULL;
    const bool has_squares = how->graft != TCH_GRAFT_NONE && how->graft != TCH_GRAFT_SGD;
    const bool one_pass = has_squares && how->norms != NULL;
    const bool fp16 =
        has_sides && (one_pass || how->graft == TCH_GRAFT_NONE) && tchi_cuda_fp16_sides_supported(s, how->sides);
    const gather_rules rules = {how->filter,
                                how->l2,
                                how->graft,
                                how->norms == NULL,
                                !fp16,
                                (double *)how->scratch,
                                has_sides ? how->notes[0] : NULL,
                                has_sides ? how->notes[1] : NULL};
    if (chosen != NULL) {
        *chosen = fp16 ? TCH_SCALAR_F16 : update->block_type;
    }
    TCHI_TRY(gather_blocks(s, update, fp16 ? TCHI_CUDA_NO_BLOCKS : TCHI_CUDA_BLOCKS, how, one_pass, rules));
    if (!fp16) {
        return TCH_OK;
    }
    return update->moments == TCH_MOMENTS_CODES  ? launch_fp16<TCH_MOMENTS_CODES>(s, update, how, rules)
           : update->moments == TCH_MOMENTS_BF16 ? launch_fp16<TCH_MOMENTS_BF16>(s, update, how, rules)
                                                 : launch_fp16<TCH_MOMENTS_REAL>(s, update, how, rules);
}
