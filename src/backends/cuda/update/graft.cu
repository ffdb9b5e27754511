/* Grafting: the step that another optimizer would take: its norm or, with `replace`, the step itself. Norms are summed
 * in double in a fixed order: over a thread's elements, over its block of threads, and then by one block over the
 * chunks that belong together, whose sums wait in scratch.
 *
 *     for (each element of a block) {
 *         v = keep * v + take * g * g;                        // beta2 and 1 - beta2; Adagrad: 1 and 1
 *         d = f / (root * sqrt(v) + eps);                     // root: 1, or 1 / sqrt(correction) for Adam; SGD: d = f
 *         sum += d * d;
 *     }
 *     norms[block] = sqrt(sum);
 */
#include "graft.cuh"

typedef struct graft_rules {
    tch_graft kind;
    int replace;
    double *partial; /* of the launch's chunks */
} graft_rules;

template <typename real, tchi_cuda_access_path path>
static __device__ inline void graft_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, const graft_rules &rules,
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
    if (!separate) {
        g = d;
    }
    if (!direct) {
#pragma unroll
        for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
            graft_four(numbers, g.at[s], v.at[s], d.at[s]);
        }
        tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_1, v);
    }
    double sum = tchi_cuda_block_sum(sum_squares(ctx, d), (int)threadIdx.x, TCHI_CUDA_UPDATE_THREADS, sums);
    if (threadIdx.x == 0) {
        rules.partial[blockIdx.x] = sum;
    }
    if (rules.replace && !direct) {
        tchi_cuda_put_block(ctx, slot, tile, d);
    }
}

/* In float32, for an element: 12 bytes read and 4 written, 4 more with `replace`, and 8 operations; for SGD 4 bytes
 * read and 2 operations. */
template <typename real>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_resident<real>())
    graft_kernel(const __grid_constant__ tchi_cuda_rects list, graft_rules rules)
{
    __shared__ graft_numbers<real> numbers;
    __shared__ real tile[TCHI_CUDA_TILE];
    __shared__ double sums[32];
    tchi_cuda_with_chunk<real, true>(list, [&](const auto &ctx) { graft_chunk(ctx, rules, numbers, tile, sums); });
}

/* --- norms ------------------------------------------------------------------------------------------------------- */

#define MOST_RANGES 1024 /* 24 KB of a kernel's parameters */

/* The chunks of one block's rectangles. */
typedef struct norm_range {
    int64_t first, count;
    int64_t block;
} norm_range;

typedef struct norm_ranges {
    norm_range at[MOST_RANGES];
} norm_ranges;

/* 8 bytes read for each chunk. */
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS)
    graft_norms_kernel(const __grid_constant__ norm_ranges ranges, const int32_t *skip, const double *partial,
                       double *norms)
{
    __shared__ double shared[32];
    const norm_range &range = ranges.at[blockIdx.x];
    if (skip != NULL && *skip != 0) {
        return;
    }
    double sum = 0;
    for (int64_t i = threadIdx.x; i < range.count; i += TCHI_CUDA_UPDATE_THREADS) {
        sum += partial[range.first + i];
    }
    sum = tchi_cuda_block_sum(sum, (int)threadIdx.x, TCHI_CUDA_UPDATE_THREADS, shared);
    if (threadIdx.x == 0) {
        norms[range.block] = sqrt(sum);
    }
}

/* Moves *rectangle behind the rectangles of one block, and *chunk behind their chunks. */
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

tch_status tchi_cuda_graft_norms(const tchi_cuda_state *state, const tch_update *update, const double *partial,
                                 double *norms)
{
    norm_ranges ranges;
    int64_t rect = 0;
    int64_t chunk = 0;
    while (rect < update->count) {
        unsigned count = 0;
        while (rect < update->count && count < MOST_RANGES) {
            ranges.at[count++] = next_range(update, &rect, &chunk);
        }
        graft_norms_kernel<<<count, TCHI_CUDA_UPDATE_THREADS, 0, state->stream>>>(ranges, update->skip, partial, norms);
        TCHI_CUDA_PASS(tchi_cuda_launched(state, "graft_norms"));
    }
    return TCH_OK;
}

int64_t tchi_cuda_graft_scratch(int64_t elements, int64_t rects)
{
    return tchi_cuda_most_chunks(elements, rects, TCHI_CUDA_LOG_CHUNK) * (int64_t)sizeof(double);
}

tch_status tchi_cuda_graft(tchi_cuda_state *state, const tch_update *update, tch_graft kind, double *norms,
                           void *scratch)
{
    graft_rules rules = {kind, norms == NULL, (double *)scratch};
    tchi_cuda_rects list;
    int64_t next = 0;
    int32_t chunks;
    while ((chunks = tchi_cuda_pack(update, TCHI_CUDA_LOG_CHUNK, TCHI_CUDA_BLOCKS, &next, &list)) > 0) {
        auto kernel = update->real == TCH_SCALAR_F64 ? graft_kernel<double> : graft_kernel<float>;
        kernel<<<chunks, TCHI_CUDA_UPDATE_THREADS, 0, state->stream>>>(list, rules);
        TCHI_CUDA_PASS(tchi_cuda_launched(state, "graft"));
        rules.partial += chunks;
    }
    return norms == NULL ? TCH_OK : tchi_cuda_graft_norms(state, update, (double *)scratch, norms);
}
