/* Squared norms of per-sample gradients: which form and which kernel, and the sum over a sample's tiles in a fixed
 * order. A sample with one position is its own case: |g|^2 |a|^2.
 *
 *     for (norm = 0, i = 0; i < p; i++) {                     // tile form: |G' A|^2 of a sample with `t` positions
 *         for (j = 0; j < d; j++) {
 *             double sum = sum over s of g[s][i] * a[s][j];
 *             norm += sum * sum;
 *         }
 *     }
 *     for (norm = 0, s = 0; s < t; s++) {                     // the same in Gram form: <A A', G G'>
 *         for (u = 0; u < t; u++) {
 *             norm += (dot(a[s], a[u]) + bias) * dot(g[s], g[u]);     // bias: 1 where there is one, else 0
 *         }
 *     }
 *
 * The one thing to know before changing it: terms of the Gram form cancel where positions do, and then little of a norm
 * is left that float32 knows. Which samples those are is found on the device, and they are done again in tile form. */
#include "sample_norms.h"

#include "backends/cuda/device/mma_tiles.cuh"
#include "backends/cuda/matrix/fp16_copy.h"

#define THREADS 256

/* --- sums over tiles --------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ double weight_of(const uint32_t *largest, int64_t matrix)
{
    double scale = largest == nullptr ? 1.0 : (double)tchi_fp16_scale(largest[matrix]);
    return 1.0 / (scale * scale);
}

static __global__ void __launch_bounds__(THREADS)
    sample_norms_add(int64_t samples, const tchi_norms_parts p, double scale, double *norms)
{
    __shared__ double sums[32];
    for (int64_t i = blockIdx.x; i < samples; i += gridDim.x) {
        double total = 0.0;
        for (int64_t matrix = i * p.groups; matrix < (i + 1) * p.groups; matrix++) {
            double one = 0.0;
            for (int64_t k = threadIdx.x; k < p.tiles; k += THREADS) {
                one += p.parts[matrix * p.tiles + k];
            }
            total += one * weight_of(p.largest_a, matrix) * weight_of(p.largest_g, matrix);
        }
        total = tchi_cuda_block_sum(total, (int)threadIdx.x, THREADS, sums);
        if (threadIdx.x == 0) {
            norms[i] += scale * total;
        }
    }
}

tch_status tchi_cuda_sample_norms_add(const tchi_cuda_state *state, int64_t samples, const tchi_norms_parts *parts,
                                      double scale, double *norms)
{
    return tchi_cuda_launch(state, "sample_norms_add", sample_norms_add, tchi_cuda_grid(samples), THREADS, samples,
                            *parts, scale, norms);
}

/* --- cancellation ------------------------------------------------------------------------------------------------ */

/* Cancellation limit, as on the CPU: sum of absolute terms over sum of terms. */
#define MOST_CANCELED 256.0

/* Results of the Gram form of `batch` matrices. */
typedef struct gram_sums {
    int64_t batch, tiles, groups;
    const double *parts, *sizes;
    double *totals; /* per matrix */
    int32_t *again; /* whether it must be recomputed in tile form */
    int32_t *list;  /* those to recompute, in any order */
    int32_t *count; /* of the list */
} gram_sums;

static __global__ void __launch_bounds__(THREADS) sample_norms_judge(const gram_sums s)
{
    __shared__ double shared[32];
    for (int64_t matrix = blockIdx.x; matrix < s.batch; matrix += gridDim.x) {
        double sum = 0.0;
        double size = 0.0;
        for (int64_t k = threadIdx.x; k < s.tiles; k += THREADS) {
            sum += s.parts[matrix * s.tiles + k];
            size += s.sizes[matrix * s.tiles + k];
        }
        sum = tchi_cuda_block_sum(sum, (int)threadIdx.x, THREADS, shared);
        size = tchi_cuda_block_sum(size, (int)threadIdx.x, THREADS, shared);
        if (threadIdx.x == 0) {
            bool again = sum * MOST_CANCELED < size;
            s.totals[matrix] = sum;
            s.again[matrix] = again;
            if (again) {
                s.list[atomicAdd(s.count, 1)] = (int32_t)matrix;
            }
        }
    }
}

static __global__ void __launch_bounds__(THREADS)
    sample_norms_settle(const gram_sums s, const double *parts, int64_t tiles, double scale, double *norms)
{
    __shared__ double shared[32];
    for (int64_t i = blockIdx.x; i < s.batch / s.groups; i += gridDim.x) {
        double total = 0.0;
        for (int64_t matrix = i * s.groups; matrix < (i + 1) * s.groups; matrix++) {
            if (!s.again[matrix]) {
                total += threadIdx.x == 0 ? s.totals[matrix] : 0.0;
                continue;
            }
            for (int64_t k = threadIdx.x; k < tiles; k += THREADS) {
                total += parts[matrix * tiles + k];
            }
        }
        total = tchi_cuda_block_sum(total, (int)threadIdx.x, THREADS, shared);
        if (threadIdx.x == 0) {
            norms[i] += scale * total;
        }
    }
}

/* Tiles of the gradient overwrite the parts, which have been summed by then. */
static tch_status finish_norms(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g, bool bias,
                               const gram_sums *s, double scale, double *norms, double *parts)
{
    int64_t tiles = 0;
    TCHI_CUDA_TRY(cudaMemsetAsync(s->count, 0, sizeof *s->count, state->stream), "sample_norms_judge");
    TCHI_TRY(tchi_cuda_launch(state, "sample_norms_judge", sample_norms_judge, tchi_cuda_grid(s->batch), THREADS, *s));
    TCHI_TRY(tchi_cuda_sample_norms_listed(state, a, g, bias, s->list, s->count, parts, &tiles));
    return tchi_cuda_launch(state, "sample_norms_settle", sample_norms_settle, tchi_cuda_grid(s->batch / s->groups),
                            THREADS, *s, parts, tiles, scale, norms);
}

/* --- one position ------------------------------------------------------------------------------------------------ */

typedef struct single_problem {
    tchi_cuda_operand a, g;
    int64_t d, p, groups, samples;
    double one; /* added to |a|^2: 1 with a bias, or 0 */
    double scale;
    double *norms;
} single_problem;

template <typename real>
static __device__ double squares_of(const tchi_cuda_operand &m, int64_t matrix, int64_t cols, double *shared)
{
    double total = 0.0;
    for (int64_t j = 4 * (int64_t)threadIdx.x; j < cols; j += 4 * THREADS) {
        tchi_cuda_vec4<real> four = tchi_cuda_load_vec4<real>(m, matrix, 0, j, cols - j < 4 ? (int)(cols - j) : 4);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            total += (double)four.v[k] * (double)four.v[k];
        }
    }
    return tchi_cuda_block_sum(total, (int)threadIdx.x, THREADS, shared);
}

/* Reads p + d elements per sample: 256 samples of 1024 to 1024 in float32 are 2 MB, negligible. */
template <typename real> static __global__ void __launch_bounds__(THREADS) sample_norms_single(const single_problem p)
{
    __shared__ double sums[32];
    for (int64_t i = blockIdx.x; i < p.samples; i += gridDim.x) {
        double total = 0.0;
        for (int64_t h = 0; h < p.groups; h++) {
            int64_t matrix = i * p.groups + h;
            total += (squares_of<real>(p.a, matrix, p.d, sums) + p.one) * squares_of<real>(p.g, matrix, p.p, sums);
        }
        if (threadIdx.x == 0) {
            p.norms[i] += p.scale * total;
        }
    }
}

static tch_status single_position(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                  int64_t groups, bool bias, double scale, double *norms)
{
    single_problem p = {tchi_cuda_operand_of(a), tchi_cuda_operand_of(g), a->cols, g->cols, groups,
                        a->batch / groups,       bias ? 1.0 : 0.0,        scale,   norms};
    unsigned grid = tchi_cuda_grid(p.samples);
    auto kernel = a->type == TCH_SCALAR_F64 ? sample_norms_single<double> : sample_norms_single<float>;
    return tchi_cuda_launch(state, "sample_norms_single", kernel, grid, THREADS, p);
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

typedef enum norms_path { PLAIN, SPLIT, MMA, WGMMA, FP16 } norms_path;

/* Throughput of an H200 in TFLOP/s of whole tiles, and cost of copies in microseconds per megabyte, to choose the form.
 * bench/logs/cuda_sample_norms.md. */
typedef struct norms_rates {
    double gram, tiles;
    double copies; /* 0 if there are none */
} norms_rates;

/* Without rounding the tile form has the plain kernel only. Float64 was not measured. */
static norms_rates rates_of(norms_path path, tch_scalar type, bool aligned)
{
    const bool f32 = type == TCH_SCALAR_F32;
    if (path == PLAIN || path == SPLIT) {
        return type == TCH_SCALAR_F64 ? norms_rates{1.0, 1.0, 0.0}
                                      : norms_rates{path == SPLIT ? 95.0 : 19.0, 29.0, 0.0};
    }
    norms_rates mma =
        aligned ? norms_rates{f32 ? 110.0 : 250.0, f32 ? 100.0 : 340.0, 0.0} : norms_rates{60.0, 70.0, 0.0};
    return path == MMA ? mma : norms_rates{mma.gram, 650.0, path == FP16 ? (f32 ? 0.85 : 0.75) : 0.0};
}

/* Whether the Gram form is faster. */
static bool gram_is_less(const tch_matrices *a, const tch_matrices *g, norms_path path, bool aligned)
{
    norms_rates rates = rates_of(path, a->type, aligned);
    double megabytes = (double)(a->rows * (a->cols + g->cols) * tchi_cuda_size(a->type)) * 1e-6;
    /* operations in whole tiles of 128, for one sample */
    double lower = (double)tchi_lower_tiles(tchi_cuda_ceil_div(a->rows, 128)) * (double)(a->cols + g->cols);
    double whole = (double)(tchi_cuda_ceil_div(g->cols, 128) * tchi_cuda_ceil_div(a->cols, 128)) * (double)a->rows;
    double unit = 2.0 * 128.0 * 128.0 * 1e-6;
    return unit * lower / rates.gram < unit * whole / rates.tiles + rates.copies * megabytes;
}

static norms_path path_of(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g, int64_t groups,
                          int32_t rounded)
{
    if (!tchi_cuda_kernel_fits(state, TCHI_NORMS_MMA, a, NULL) || (a->type == TCH_SCALAR_F32 && !rounded)) {
        /* For a few columns the plain kernel is more accurate, and fast enough. */
        bool many = a->cols >= 32 && g->cols >= 32;
        return many && tchi_cuda_sample_norms_gram_supported(state, a, g) ? SPLIT : PLAIN;
    }
    if (tchi_cuda_sample_norms_wgmma_supported(state, a, g)) {
        return WGMMA;
    }
    return tchi_cuda_sample_norms_fp16_supported(state, a, g, groups) ? FP16 : MMA;
}

/* `bias` only in Gram form. */
static tch_status compute_parts(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                norms_path path, bool gram, bool bias, double *parts, double *sizes, int64_t *tiles)
{
    if (path == SPLIT && gram) {
        return tchi_cuda_sample_norms_split(state, a, g, bias, parts, sizes, tiles);
    }
    if (path == PLAIN || path == SPLIT) {
        return tchi_cuda_sample_norms_plain(state, a, g, gram, bias, parts, sizes, tiles);
    }
    if (path == WGMMA && !gram) {
        return tchi_cuda_sample_norms_wgmma(state, a, g, parts, tiles);
    }
    if (gram && tchi_cuda_sample_norms_gram_supported(state, a, g)) {
        return tchi_cuda_sample_norms_wgmma_gram(state, a, g, bias, parts, sizes, tiles);
    }
    return tchi_cuda_sample_norms_mma(state, a, g, gram ? TCHI_NORMS_GRAM : TCHI_NORMS_TILES, bias, parts, sizes,
                                      tiles);
}

/* Maximum number of parts per matrix: 8 of wgmma's tiles, of 128 by 256 in either orientation; 9 of 128 by 128 in Gram
 * form, and as many sizes. The plain kernel's 64 by 64 tiles, with a bias column, are not more. */
static int64_t most_parts(int64_t positions, int64_t d, int64_t p)
{
    int64_t across = 16 * tchi_cuda_ceil_div(d + 1, 256) * tchi_cuda_ceil_div(p, 256);
    int64_t lower = 2 * 9 * tchi_lower_tiles(tchi_cuda_ceil_div(positions, 128));
    return across > lower ? across : lower;
}

/* Scratch layout: parts and sizes, totals, list of matrices to redo. */
static gram_sums gram_sums_in(double *scratch, const tch_matrices *a, const tch_matrices *g, int64_t groups)
{
    int64_t parts = a->batch * most_parts(a->rows, a->cols, g->cols);
    gram_sums s = {};
    s.batch = a->batch;
    s.groups = groups;
    s.parts = scratch;
    s.sizes = scratch + parts / 2;
    s.totals = scratch + parts;
    s.again = (int32_t *)(s.totals + a->batch);
    s.list = s.again + a->batch;
    s.count = s.list + a->batch;
    return s;
}

static tch_status norms_by_tiles(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                 int64_t groups, norms_path path, double scale, double *norms, double *parts)
{
    tchi_norms_parts sums = {parts, 0, groups, nullptr, nullptr};
    if (path == FP16) {
        return tchi_cuda_sample_norms_fp16(state, a, g, groups, scale, norms, parts);
    }
    TCHI_TRY(compute_parts(state, a, g, path, false, false, parts, nullptr, &sums.tiles));
    return tchi_cuda_sample_norms_add(state, a->batch / groups, &sums, scale, norms);
}

/* The bias's part, separately: reads G once more. */
static tch_status bias_norms(void *state, const tch_matrices *g, int64_t groups, double scale, const tch_matrices *sums,
                             double *norms, void *scratch)
{
    tch_matrices rows = *sums;
    rows.batch = 1;
    rows.rows = sums->batch;
    TCHI_TRY(tchi_cuda_sample_sums(state, g, 1.0, 0.0, &rows, scratch));
    return tchi_cuda_pair_dots(state, sums, sums, groups, scale, norms, scratch);
}

extern "C" tch_status tchi_cuda_sample_norms(void *state, const tch_matrices *a, const tch_matrices *g, int64_t groups,
                                             double scale, int32_t rounded, const tch_matrices *sums, double *norms,
                                             void *scratch)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    double *parts = (double *)scratch;
    bool bias = sums != nullptr;
    if (a->batch == 0 || a->rows == 0 || g->cols == 0) {
        return TCH_OK;
    }
    if (a->rows == 1) {
        return single_position(s, a, g, groups, bias, scale, norms);
    }
    if (a->cols > 0) {
        norms_path path = path_of(s, a, g, groups, rounded);
        if (gram_is_less(a, g, path, tchi_tile_aligned(a) && tchi_tile_aligned(g))) {
            gram_sums sums = gram_sums_in(parts, a, g, groups);
            TCHI_TRY(compute_parts(s, a, g, path, true, bias, parts, (double *)sums.sizes, &sums.tiles));
            return finish_norms(s, a, g, bias, &sums, scale, norms, parts);
        }
        TCHI_TRY(norms_by_tiles(s, a, g, groups, path, scale, norms, parts));
    }
    return bias ? bias_norms(state, g, groups, scale, sums, norms, scratch) : TCH_OK;
}

/* A double per part, and per matrix a total and two 32-bit numbers; one more double for the count. */
extern "C" int64_t tchi_cuda_sample_norms_scratch(int64_t positions, int64_t d, int64_t p, int64_t batch)
{
    return (batch * (most_parts(positions, d, p) + 2) + 1) * (int64_t)sizeof(double);
}
