/* Gather and graft in one pass, as Shampoo does them in most of its steps: a gradient is read once, and neither it nor
 * what the filter makes of it is read again for the norm. The same formulas in the same order, so the same bits.
 *
 *     g, m and block[0], block[1]                             // see blocks.cu
 *     v and |d|                                               // see graft.cu
 *     largest[block], filtered[block] = the most bits of |g| and of |f|
 */
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

/* Zeros beyond the edge of a rectangle do not count. */
template <typename real> static __device__ inline void note_largest(const tchi_cuda_vec4s<real> &g, uint32_t *largest)
{
    uint32_t most = 0;
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            most = max(most, __float_as_uint((float)g.at[s].v[k]) & 0x7FFFFFFFu);
        }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance));
    }
    if (threadIdx.x % 32 == 0 && most > 0) {
        atomicMax(largest, most);
    }
}

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
                 tchi_cuda_vec4s<real> &v, real *tile)
{
    tchi_cuda_vec4s<real> f = g;
    if (rules.filter != TCH_FILTER_NONE) {
#pragma unroll
        for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
            f.at[s] = filter_four(numbers.gather, rules.filter, g.at[s], m.at[s]);
        }
        tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_0, m);
        if (rules.largest != nullptr) {
            note_largest(f, rules.filtered + ctx.rect.block_index);
        }
        store_gathered(ctx, TCHI_CUDA_BLOCK_1, tile, f);
    }
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        graft_four(numbers.graft, g.at[s], v.at[s], f.at[s]);
    }
    tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_1, v);
    return sum_squares(ctx, f);
}

template <typename real, tchi_cuda_access_path path>
static __device__ inline void gather_graft_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx,
                                                 const gather_graft_rules &rules, gather_graft_numbers<real> &numbers,
                                                 real *tile, double *sums)
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
    if (rules.largest != nullptr) {
        note_largest(g, rules.largest + ctx.rect.block_index);
    }
    store_gathered(ctx, TCHI_CUDA_BLOCK_0, tile, g);
    double sum = filter_and_graft(ctx, rules, numbers, g, m, v, tile);
    sum = tchi_cuda_block_sum(sum, (int)threadIdx.x, TCHI_CUDA_UPDATE_THREADS, sums);
    if (threadIdx.x == 0) {
        rules.partial[blockIdx.x] = sum;
    }
}

/* In float32, for an element: 12 bytes read, 16 written, 12 operations. One after the other they read 20 and write
 * 16. */
template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_resident<real>())
    gather_graft_kernel(const __grid_constant__ tchi_cuda_rects list, gather_graft_rules rules)
{
    __shared__ gather_graft_numbers<real> numbers;
    __shared__ real tile[TCHI_CUDA_TILE];
    __shared__ double sums[32];
    tchi_cuda_with_chunk<real, true>(list,
                                     [&](const auto &ctx) { gather_graft_chunk(ctx, rules, numbers, tile, sums); });
}

#define EVEN_RESIDENT 4

/* The same where all chunks are alike and there is no weight decay in gradients: with fewer registers more blocks
 * fit. */
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, EVEN_RESIDENT)
    gather_graft_even_kernel(const __grid_constant__ tchi_cuda_rects list, gather_graft_rules rules)
{
    __shared__ gather_graft_numbers<float> numbers;
    __shared__ float tile[TCHI_CUDA_TILE];
    __shared__ double sums[32];
    rules.l2 = 0;
    tchi_cuda_with_even_chunk<TCHI_CUDA_PLAIN>(
        list, [&](const auto &ctx) { gather_graft_chunk(ctx, rules, numbers, tile, sums); });
}

static tch_status clear_largest(const tchi_cuda_state *state, const tch_update *update, uint32_t *largest)
{
    int64_t blocks = 0;
    for (int64_t k = 0; k < update->count; k++) {
        blocks = update->rects[k].block_index >= blocks ? update->rects[k].block_index + 1 : blocks;
    }
    return tchi_cuda_check(cudaMemsetAsync(largest, 0, (size_t)blocks * sizeof *largest, state->stream),
                           "gather_graft");
}

tch_status tchi_cuda_gather_graft(void *state, const tch_update *update, tch_filter filter, int32_t l2, tch_graft kind,
                                  double *norms, void *scratch, uint32_t *largest, uint32_t *filtered)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    gather_graft_rules rules = {filter, l2, kind, (double *)scratch, largest, filtered};
    tchi_cuda_rects list;
    int64_t next = 0;
    int32_t chunks;
    if (largest != NULL && update->count > 0) {
        TCHI_CUDA_PASS(clear_largest(s, update, largest));
        TCHI_CUDA_PASS(filter == TCH_FILTER_NONE ? TCH_OK : clear_largest(s, update, filtered));
    }
    while ((chunks = tchi_cuda_pack(update, TCHI_CUDA_LOG_CHUNK, TCHI_CUDA_BLOCKS, &next, &list)) > 0) {
        bool even = list.even && list.plain && !l2;
        auto kernel = update->real == TCH_SCALAR_F64 ? gather_graft_kernel<double>
                      : even                         ? gather_graft_even_kernel
                                                     : gather_graft_kernel<float>;
        kernel<<<chunks, TCHI_CUDA_UPDATE_THREADS, 0, s->stream>>>(list, rules);
        TCHI_CUDA_PASS(tchi_cuda_launched(s, "gather_graft"));
        rules.partial += chunks;
    }
    return tchi_cuda_graft_norms(s, update, (double *)scratch, norms);
}
