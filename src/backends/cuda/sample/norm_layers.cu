/* Per-sample gradients of the weight and bias of normalization layers. First the mean and the reciprocal standard
 * deviation of every row, with the mean subtracted before squaring, by a warp or a block for each; then the sums over
 * positions. Layer and RMS norms have their features along rows, group norms their positions.
 *
 *     for (each row x of `length` elements) {                 // warp_stats, block_stats
 *         mean = centered ? sum of x[j] / length : 0;
 *         rstd = 1 / sqrt(sum of (x[j] - mean)^2 / length + eps);
 *     }
 *     for (each sample, each feature j) {
 *         for (s = 0; s < positions; s++) {
 *             weight[j] += scale * (x[s][j] - mean) * rstd * g[s][j];
 *             bias[j] += scale * g[s][j];
 *         }
 *     } */
#include "backends/cuda/device/batch_walk.cuh"
#include "position_sums.cuh"

#define THREADS 256
#define WARP_ROW 4096 /* elements of a row for a warp; longer ones have a block */
#define AT_ONCE 4     /* vec4s in flight in a thread */

template <typename real> struct row_stats {
    real mean, scale; /* x^ = (x - mean) scale */
};

typedef struct stats_call {
    tchi_cuda_operand x; /* a single matrix: rows by length */
    int64_t rows, length;
    int32_t centered; /* the mean is subtracted */
    double eps;
} stats_call;

/* --- statistics -------------------------------------------------------------------------------------------------- */

/* The sum of (x - mean)^power over a row, power 1 or 2; `thread` of `threads`. */
template <typename real, int power>
static __device__ inline double sum_of_row(const stats_call &c, int64_t row, real mean, int thread, int threads)
{
    double sum = 0;
    for (int64_t j = (int64_t)thread * 4; j < c.length; j += (int64_t)threads * 4 * AT_ONCE) {
        tchi_cuda_vec4<real> x[AT_ONCE];
        int count[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            int64_t left = c.length - j - (int64_t)k * threads * 4;
            count[k] = left < 0 ? 0 : left < 4 ? (int)left : 4;
            x[k] = tchi_cuda_load_vec4<real>(c.x, 0, row, j + (int64_t)k * threads * 4, count[k]);
        }
        real part = 0;
#pragma unroll
        for (int k = 0; k < 4 * AT_ONCE; k++) {
            real gap = k % 4 < count[k / 4] ? x[k / 4].v[k % 4] - mean : (real)0;
            part += power == 1 ? gap : gap * gap;
        }
        sum += (double)part;
    }
    return sum;
}

/* Over the block, or over a warp if `shared` is NULL. */
static __device__ inline double sum_over(double value, int thread, double *shared)
{
    return shared != NULL ? tchi_cuda_block_sum(value, thread, THREADS, shared) : tchi_cuda_warp_sum(value);
}

template <typename real>
static __device__ inline row_stats<real> stats_of_row(const stats_call &c, int64_t row, int thread, int threads,
                                                      double *shared)
{
    double mean = 0;
    if (c.centered) {
        mean = sum_over(sum_of_row<real, 1>(c, row, (real)0, thread, threads), thread, shared) / (double)c.length;
    }
    double squares = sum_over(sum_of_row<real, 2>(c, row, (real)mean, thread, threads), thread, shared);
    return {(real)mean, (real)(1.0 / sqrt(squares / (double)c.length + c.eps))};
}

/* x (rows, length). Memory: x once, the second pass over a row from cache. Compute: four operations per element. A warp
 * or a block per row. */
template <typename real, bool by_warps>
static __global__ void __launch_bounds__(THREADS)
    row_stats_kernel(const __grid_constant__ stats_call c, row_stats<real> *stats)
{
    __shared__ double shared[32];
    const int threads = by_warps ? 32 : THREADS;
    const int thread = (int)threadIdx.x % threads;
    const int64_t first = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / threads;
    for (int64_t row = first; row < c.rows; row += (int64_t)gridDim.x * (THREADS / threads)) {
        row_stats<real> found = stats_of_row<real>(c, row, thread, threads, by_warps ? NULL : shared);
        if (thread == 0) {
            stats[row] = found;
        }
    }
}

template <typename real>
static tch_status run_stats(const tchi_cuda_state *state, const stats_call &c, row_stats<real> *stats)
{
    const bool by_warps = c.length <= WARP_ROW;
    auto kernel = by_warps ? row_stats_kernel<real, true> : row_stats_kernel<real, false>;
    return tchi_cuda_launch(state, "row_stats", kernel,
                            tchi_cuda_grid(c.length == 0 ? 0 : tchi_cuda_ceil_div(c.rows, by_warps ? THREADS / 32 : 1)),
                            THREADS, c, stats);
}

/* --- features along rows ----------------------------------------------------------------------------------------- */

/* x^ g and g of each position. */
template <typename real> struct normalized_terms {
    static const int outputs = 2;
    tchi_cuda_operand x, g;
    const row_stats<real> *stats;
    int64_t positions;

    __device__ inline void load(int64_t b, int64_t i, int64_t j, int count, tchi_cuda_vec4<real> *values) const
    {
        if (count == 0) {
            values[0] = values[1] = {};
            return;
        }
        row_stats<real> row = stats[b * positions + i];
        tchi_cuda_vec4<real> seen = tchi_cuda_load_vec4<real>(x, b, i, j, count);
        values[1] = tchi_cuda_load_vec4<real>(g, b, i, j, count);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            values[0].v[k] = k < count ? (seen.v[k] - row.mean) * row.scale * values[1].v[k] : (real)0;
        }
    }
};

/* --- positions along rows ---------------------------------------------------------------------------------------- */

typedef struct channel_call {
    tchi_cuda_operand x, g; /* a single matrix each: samples times channels by positions */
    int64_t rows, channels, positions, groups;
    tchi_cuda_sum_target<2> target;
} channel_call;

struct channel_sums {
    double weight, bias;
};

template <typename real>
static __device__ inline channel_sums sums_of_channel(const channel_call &c, int64_t row, real mean, real scale)
{
    channel_sums sums = {0, 0};
    for (int64_t j = (int64_t)threadIdx.x * 4; j < c.positions; j += (int64_t)blockDim.x * 4) {
        int count = c.positions - j < 4 ? (int)(c.positions - j) : 4;
        tchi_cuda_vec4<real> x = tchi_cuda_load_vec4<real>(c.x, 0, row, j, count);
        tchi_cuda_vec4<real> g = tchi_cuda_load_vec4<real>(c.g, 0, row, j, count);
        real weight = 0;
        real bias = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            weight += k < count ? (x.v[k] - mean) * scale * g.v[k] : (real)0;
            bias += g.v[k];
        }
        sums.weight += (double)weight;
        sums.bias += (double)bias;
    }
    return sums;
}

/* x, g (rows, positions), a row being a channel of a sample. Memory: both once. Compute: four operations per element. A
 * block per channel. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    channel_sums_kernel(const __grid_constant__ channel_call c, const row_stats<real> *stats)
{
    __shared__ double shared[32];
    const int threads = (int)blockDim.x;
    const int64_t size = c.channels / c.groups; /* of a group */
    for (int64_t row = blockIdx.x; row < c.rows; row += gridDim.x) {
        row_stats<real> group = {};
        if (c.positions > 0) {
            group = stats[row / size];
        }
        channel_sums sums = sums_of_channel<real>(c, row, group.mean, group.scale);
        double weight = tchi_cuda_block_sum(sums.weight, (int)threadIdx.x, threads, shared);
        double bias = tchi_cuda_block_sum(sums.bias, (int)threadIdx.x, threads, shared);
        if (threadIdx.x == 0) {
            int64_t sample = row / c.channels;
            tchi_cuda_put_sum(c.target, 0, sample, row - sample * c.channels, weight);
            tchi_cuda_put_sum(c.target, 1, sample, row - sample * c.channels, bias);
        }
    }
}

/* --- the operation ----------------------------------------------------------------------------------------------- */

static tchi_cuda_operand rows_of(const void *data, tch_scalar type, int64_t rows, int64_t cols, int64_t batch)
{
    tch_matrices m = {(void *)data, type, rows, cols, cols, batch, rows * cols};
    return tchi_cuda_operand_of(&m);
}

/* Positions along rows: statistics of groups, then sums of channels. */
template <typename real>
static tch_status group_norm_sums(const tchi_cuda_state *state, const tch_normalized *layer,
                                  const tchi_cuda_sum_target<2> &target, row_stats<real> *stats)
{
    const int64_t channels = layer->samples * layer->features, groups = layer->samples * layer->groups;
    const int64_t length = layer->features / layer->groups * layer->positions;
    stats_call statistics = {rows_of(layer->x, layer->type, groups, length, 1), groups, length, 1, layer->eps};
    TCHI_TRY(run_stats<real>(state, statistics, stats));
    channel_call c = {rows_of(layer->x, layer->type, channels, layer->positions, 1),
                      rows_of(layer->g, layer->type, channels, layer->positions, 1),
                      channels,
                      layer->features,
                      layer->positions,
                      layer->groups,
                      target};
    unsigned threads = layer->positions <= 256 ? 32 : layer->positions <= 1024 ? 64 : THREADS;
    return tchi_cuda_launch(state, "channel_sums", channel_sums_kernel<real>, tchi_cuda_grid(channels), threads, c,
                            stats);
}

/* Features along rows. */
template <typename real>
static tch_status feature_norm_sums(const tchi_cuda_state *state, const tch_normalized *layer,
                                    const tchi_cuda_sum_target<2> &target, row_stats<real> *stats)
{
    const int64_t rows = layer->samples * layer->positions;
    stats_call statistics = {rows_of(layer->x, layer->type, rows, layer->features, 1), rows, layer->features,
                             layer->kind != TCH_LAYER_RMS_NORM, layer->eps};
    TCHI_TRY(run_stats<real>(state, statistics, stats));
    normalized_terms<real> terms = {rows_of(layer->x, layer->type, layer->positions, layer->features, layer->samples),
                                    rows_of(layer->g, layer->type, layer->positions, layer->features, layer->samples),
                                    stats, layer->positions};
    tchi_cuda_sum_extent e = tchi_cuda_sum_extent_of(layer->samples, layer->positions, layer->features);
    return tchi_cuda_run_sums<real>(state, e, terms, target, stats + rows, "normalized_sums");
}

template <typename real>
static tch_status norm_sums(const tchi_cuda_state *state, const tch_normalized *layer,
                            const tchi_cuda_sum_target<2> &target, void *scratch)
{
    row_stats<real> *stats = (row_stats<real> *)scratch;
    return layer->kind == TCH_LAYER_GROUP_NORM ? group_norm_sums(state, layer, target, stats)
                                               : feature_norm_sums(state, layer, target, stats);
}

/* The number of groups is unknown here; at most the number of channels. */
int64_t tchi_cuda_normalized_scratch(tch_scalar type, int64_t positions, int64_t features, int64_t samples)
{
    int64_t each = type == TCH_SCALAR_F64 ? sizeof(row_stats<double>) : sizeof(row_stats<float>);
    int64_t rows = positions > features ? positions : features;
    return samples * rows * each + tchi_cuda_sum_scratch(samples, positions, features, 2);
}

tch_status tchi_cuda_normalized_sums(void *state, const tch_normalized *layer, double scale, const tch_matrices *weight,
                                     const tch_matrices *bias, void *scratch)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    tchi_cuda_sum_target<2> target = {};
    if (layer->samples == 0 || layer->features == 0) {
        return TCH_OK;
    }
    if (weight != NULL) {
        target.out[0] = tchi_cuda_operand_of(weight);
    }
    if (bias != NULL) {
        target.out[1] = tchi_cuda_operand_of(bias);
    }
    target.scale = scale;
    return layer->type == TCH_SCALAR_F64 ? norm_sums<double>(s, layer, target, scratch)
                                         : norm_sums<float>(s, layer, target, scratch);
}
