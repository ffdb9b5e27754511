/* From blocks to parameters: scales a direction, applies momentum, and updates the parameter.
 *
 *     d = block * (as is ? 1 : (unit rms ? sqrt(target) : target) / norm);    // target and norm of the block
 *     if (momentum != 0) {
 *         buffer = momentum * buffer + d;
 *         d = nesterov ? momentum * buffer + d : buffer;
 *     }
 *     p = (decays ? 1 - lr * weight_decay : 1) * p - lr * factor * d;  // cautious: decays where d * p >= 0
 *
 * where for NorMuon d = block / (sqrt(v of the row) + eps) / norm: rows.cu. */
#include "backends/rules.h"

#include "updates.cuh"

/* Arguments of the call. */
typedef struct apply_rules {
    tch_block_scale scale;
    const double *target_norms;
    double *norms;
    int nesterov;
    tch_decay decay;
} apply_rules;

template <typename real> struct apply_numbers {
    real scale;          /* of the direction; of rows 1 / norm: it is rounded before the step, like one that is sent */
    real keep;           /* buffer = keep buffer + d */
    real along, against; /* p = along p - step d where d p >= 0 */
    real step;
    real eps; /* of rows: d = scale block / (sqrt(v) + eps) */
    int momentum, skip;
};

static __device__ double scale_of(const apply_rules &rules, int32_t block)
{
    if (rules.scale == TCH_BLOCK_AS_IS) {
        return 1.0;
    }
    double norm = rules.norms[block];
    double target = rules.target_norms[block];
    double scale = norm == 0.0 ? 0.0 : (rules.scale == TCH_BLOCK_GRAFT ? target : sqrt(target)) / norm;
    return rules.scale == TCH_BLOCK_CLIP_RMS && scale > 1.0 ? 1.0 : scale;
}

template <typename real, bool by_rows>
static __device__ apply_numbers<real> numbers_of(const tchi_cuda_rects &list, const tchi_cuda_rect &rect,
                                                 const apply_rules &rules)
{
    const tch_hyper *h = list.hyper;
    const double norm = by_rows ? rules.norms[rect.block_index] : 0.0;
    apply_numbers<real> n;
    n.scale = by_rows ? (norm > 0.0 ? (real)(1.0 / norm) : (real)0) : (real)scale_of(rules, rect.block_index);
    n.keep = (real)h->momentum;
    const tchi_keep keep = tchi_rule_keep(h, rules.decay);
    n.along = (real)keep.along;
    n.against = (real)keep.against;
    n.step = (real)(h->lr * rect.factor);
    n.eps = (real)h->eps;
    n.momentum = !by_rows && rect.data[TCHI_CUDA_STATE_2] != NULL && h->momentum != 0.0;
    n.skip = tchi_cuda_skips(list);
    return n;
}

/* --- scales of rows ---------------------------------------------------------------------------------------------- */

template <typename real>
static __device__ inline real row_scale(const tchi_cuda_rect &rect, const apply_numbers<real> &n, int64_t row)
{
    real divisor = sqrt(((const real *)rect.data[TCHI_CUDA_STATE_1])[row]) + n.eps;
    return divisor > 0 ? (real)1 / divisor : (real)0;
}

/* Scales of the thread's four: that of its row, or one per column; zero beyond the rectangle. */
template <typename real>
static __device__ inline tchi_cuda_vec4<real> four_scales(const tchi_cuda_rect &rect, const apply_numbers<real> &n,
                                                          const tchi_cuda_corner &chunk, int step)
{
    const int number = tchi_cuda_number(step);
    const int64_t row = chunk.row + (number >> rect.log_width);
    const int64_t col = chunk.col + (number & ((1 << rect.log_width) - 1));
    tchi_cuda_vec4<real> scale = {};
    if (!rect.by_column) {
        scale.v[0] = row < rect.rows ? row_scale(rect, n, row) : (real)0;
        scale.v[1] = scale.v[2] = scale.v[3] = scale.v[0];
        return scale;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        scale.v[k] = col + k < rect.cols ? row_scale(rect, n, col + k) : (real)0;
    }
    return scale;
}

/* --- the kernel -------------------------------------------------------------------------------------------------- */

template <bool by_rows, typename real, tchi_cuda_access_path path>
static __device__ inline void apply_chunk(const tchi_cuda_chunk_ctx<real, path> &ctx, const apply_rules &rules,
                                          apply_numbers<real> &numbers, real *tile)
{
    tchi_cuda_slot from =
        !by_rows && tchi_cuda_chunk_has(ctx, TCHI_CUDA_BLOCK_1) ? TCHI_CUDA_BLOCK_1 : TCHI_CUDA_BLOCK_0;
    bool buffered = !by_rows && tchi_cuda_chunk_has(ctx, TCHI_CUDA_STATE_2);
    tchi_cuda_vec4s<real> d = tchi_cuda_fetch(ctx, from);
    tchi_cuda_vec4s<real> p = tchi_cuda_fetch_param(ctx);
    tchi_cuda_vec4s<real> buffer = tchi_cuda_fetch_if(buffered, ctx, TCHI_CUDA_STATE_2);
    if (threadIdx.x == 0) {
        numbers = numbers_of<real, by_rows>(ctx.list, ctx.rect, rules);
    }
    __syncthreads();
    if (numbers.skip) {
        if (!by_rows && threadIdx.x == 0 && rules.norms != NULL) {
            rules.norms[ctx.rect.block_index] = -1.0;
        }
        return;
    }
    tchi_cuda_unpack_block(ctx, from, tile, d);
    tchi_cuda_unpack_param(ctx, p);
#pragma unroll
    for (int s = 0; s < TCHI_CUDA_STEPS; s++) {
        tchi_cuda_vec4<real> scales = {};
        if (by_rows) {
            scales = four_scales(ctx.rect, numbers, ctx.corner, s);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            real block = by_rows ? scales.v[k] * d.at[s].v[k] : d.at[s].v[k];
            real direction = numbers.scale * block, *kept = &buffer.at[s].v[k];
            if (numbers.momentum) {
                *kept = fma(numbers.keep, *kept, direction);
                direction = rules.nesterov ? fma(numbers.keep, *kept, direction) : *kept;
            }
            real was = p.at[s].v[k];
            p.at[s].v[k] =
                fma(direction * was >= 0 ? numbers.along : numbers.against, was, -(numbers.step * direction));
        }
    }
    if (numbers.momentum) {
        tchi_cuda_put_all(ctx, TCHI_CUDA_STATE_2, buffer);
    }
    tchi_cuda_put_param(ctx, p);
}

/* In float32, for an element: 8 bytes read and 4 written, 12 and 8 with momentum. */
template <typename real, bool by_rows>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, tchi_cuda_resident<real>())
    apply_kernel(const __grid_constant__ tchi_cuda_rects list, apply_rules rules)
{
    __shared__ apply_numbers<real> numbers;
    __shared__ real tile[TCHI_CUDA_TILE];
    tchi_cuda_with_chunk<real, true>(list, [&](const auto &ctx) { apply_chunk<by_rows>(ctx, rules, numbers, tile); });
}

/* The same if all chunks are full and aligned, as most are: for Muon's directions 6 bytes read and 4 written. Twice as
 * many blocks, and so loads in flight, fit on a multiprocessor. */
template <tchi_cuda_access_path path, bool by_rows>
static __global__ void __launch_bounds__(TCHI_CUDA_UPDATE_THREADS, TCHI_CUDA_EVEN_RESIDENT)
    apply_even_kernel(const __grid_constant__ tchi_cuda_rects list, apply_rules rules)
{
    __shared__ apply_numbers<float> numbers;
    __shared__ float tile[TCHI_CUDA_TILE];
    tchi_cuda_with_even_chunk<path>(list, [&](const auto &ctx) { apply_chunk<by_rows>(ctx, rules, numbers, tile); });
}

tch_status tchi_cuda_apply(void *state, const tch_update *update, tch_block_scale scale, const double *target_norms,
                           double *norms, int32_t nesterov, tch_decay decay)
{
    return tchi_cuda_launch_update<apply_rules>(state, update, TCHI_CUDA_BLOCKS, "apply",
                                                {apply_kernel<double, false>, apply_kernel<float, false>,
                                                 apply_even_kernel<TCHI_CUDA_SHORT, false>,
                                                 apply_even_kernel<TCHI_CUDA_PLAIN, false>},
                                                {scale, target_norms, norms, nesterov, decay});
}

tch_status tchi_cuda_apply_rows(void *state, const tch_update *update, double *norms, double *parts, tch_decay decay)
{
    TCHI_TRY(tchi_cuda_row_moments(state, update, norms, parts));
    return tchi_cuda_launch_update<apply_rules>(
        state, update, TCHI_CUDA_ROWS, "apply_rows",
        {apply_kernel<double, true>, apply_kernel<float, true>, apply_even_kernel<TCHI_CUDA_SHORT, true>},
        {TCH_BLOCK_AS_IS, NULL, norms, 0, decay});
}
