/* Per-sample gradients of the weights of normalization layers. Statistics are computed in float64 in two passes, mean
 * first, so that a mean much larger than the deviation does not cancel. Other types are converted in strips that stay
 * in L1. */
#include "backends/cpu/cpu.h"

#include <math.h>

#include "backends/cpu/runtime/vector_clones.h"
#include "core/arith.h"

#define STRIP 256

typedef struct normalized_ctx {
    const tch_normalized *layer;
    double scale;
    const tch_matrices *weight, *bias;
    double *sums; /* two rows of features for each thread */
} normalized_ctx;

int64_t tchi_cpu_normalized_scratch(const tchi_cpu_state *state, int64_t features)
{
    return (int64_t)state->threads * 2 * features * (int64_t)sizeof(double);
}

/* --- over contiguous numbers ------------------------------------------------------------------------------------- */

VECTOR_CLONES static double sum_strip(int64_t n, const double *x)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += x[i];
    }
    return sum;
}

VECTOR_CLONES static double squares_about(int64_t n, const double *x, double mean)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += (x[i] - mean) * (x[i] - mean);
    }
    return sum;
}

VECTOR_CLONES static double product_about(int64_t n, const double *x, double mean, const double *g)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += (x[i] - mean) * g[i];
    }
    return sum;
}

VECTOR_CLONES static void add_products(int64_t n, const double *restrict x, double mean, double factor,
                                       const double *restrict g, double *restrict weight, double *restrict bias)
{
    for (int64_t i = 0; i < n; i++) {
        weight[i] += (x[i] - mean) * factor * g[i];
        bias[i] += g[i];
    }
}

/* Elements [first, first + n) in float64, n at most STRIP. */
static const double *widen_strip(const void *data, tch_scalar type, int64_t first, int64_t n, double *buffer)
{
    if (type == TCH_SCALAR_F64) {
        return (const double *)data + first;
    }
    tchi_convert(n, TCH_SCALAR_F64, buffer, type, (const char *)data + first * tchi_cpu_size(type));
    return buffer;
}

typedef struct statistics {
    double mean, factor; /* x^ = (x - mean) factor */
} statistics;

/* Of `count` elements from `first` on; RMS norm does not subtract the mean. */
static statistics statistics_of(const tch_normalized *layer, int64_t first, int64_t count)
{
    double buffer[STRIP], sum = 0;
    for (int64_t i = 0; i < count && layer->kind != TCH_LAYER_RMS_NORM; i += STRIP) {
        int64_t n = tchi_min(STRIP, count - i);
        sum += sum_strip(n, widen_strip(layer->x, layer->type, first + i, n, buffer));
    }
    statistics s = {.mean = sum / (double)count};
    double squares = 0;
    for (int64_t i = 0; i < count; i += STRIP) {
        int64_t n = tchi_min(STRIP, count - i);
        squares += squares_about(n, widen_strip(layer->x, layer->type, first + i, n, buffer), s.mean);
    }
    s.factor = 1.0 / sqrt(squares / (double)count + layer->eps);
    return s;
}

static void store_scaled(const normalized_ctx *j, const tch_matrices *out, int64_t sample, int64_t feature,
                         double value)
{
    if (out != NULL) {
        tchi_cpu_set(out, 0, sample, feature, j->scale * value);
    }
}

/* --- features last: layer norm and RMS norm ---------------------------------------------------------------------- */

static void add_position(const tch_normalized *layer, int64_t position, double *weight, double *bias)
{
    double x_buffer[STRIP], g_buffer[STRIP];
    int64_t first = position * layer->features;
    statistics s = statistics_of(layer, first, layer->features);
    for (int64_t i = 0; i < layer->features; i += STRIP) {
        int64_t n = tchi_min(STRIP, layer->features - i);
        const double *x = widen_strip(layer->x, layer->type, first + i, n, x_buffer);
        const double *g = widen_strip(layer->g, layer->type, first + i, n, g_buffer);
        add_products(n, x, s.mean, s.factor, g, weight + i, bias + i);
    }
}

static void features_last(void *argument, int64_t sample, int thread)
{
    const normalized_ctx *j = argument;
    const tch_normalized *layer = j->layer;
    double *weight = j->sums + 2 * layer->features * (int64_t)thread;
    double *bias = weight + layer->features;
    for (int64_t i = 0; i < 2 * layer->features; i++) {
        weight[i] = 0;
    }
    for (int64_t p = 0; p < layer->positions; p++) {
        add_position(layer, sample * layer->positions + p, weight, bias);
    }
    for (int64_t i = 0; i < layer->features; i++) {
        store_scaled(j, j->weight, sample, i, weight[i]);
        store_scaled(j, j->bias, sample, i, bias[i]);
    }
}

/* --- channels first: group norm ---------------------------------------------------------------------------------- */

static void sum_channel(const normalized_ctx *j, int64_t sample, int64_t channel, statistics s)
{
    const tch_normalized *layer = j->layer;
    double x_buffer[STRIP], g_buffer[STRIP], weight = 0, bias = 0;
    int64_t first = (sample * layer->features + channel) * layer->positions;
    for (int64_t i = 0; i < layer->positions; i += STRIP) {
        int64_t n = tchi_min(STRIP, layer->positions - i);
        const double *x = widen_strip(layer->x, layer->type, first + i, n, x_buffer);
        const double *g = widen_strip(layer->g, layer->type, first + i, n, g_buffer);
        weight += product_about(n, x, s.mean, g);
        bias += sum_strip(n, g);
    }
    store_scaled(j, j->weight, sample, channel, weight * s.factor);
    store_scaled(j, j->bias, sample, channel, bias);
}

static void channels_first(void *argument, int64_t sample, int thread)
{
    const normalized_ctx *j = argument;
    const tch_normalized *layer = j->layer;
    int64_t channels = layer->features / layer->groups;
    for (int64_t group = 0; group < layer->groups; group++) {
        int64_t first = (sample * layer->features + group * channels) * layer->positions;
        statistics s = statistics_of(layer, first, channels * layer->positions);
        for (int64_t c = group * channels; c < (group + 1) * channels; c++) {
            sum_channel(j, sample, c, s);
        }
    }
}

tch_status tchi_cpu_normalized_sums(void *state, const tch_normalized *layer, double scale, const tch_matrices *weight,
                                    const tch_matrices *bias, void *scratch)
{
    normalized_ctx ctx = {layer, scale, weight, bias, scratch};
    double work = 8.0 * (double)layer->positions * (double)layer->features;
    tchi_cpu_for_each(state, layer->samples, work, layer->kind == TCH_LAYER_GROUP_NORM ? channels_first : features_last,
                      &ctx);
    return TCH_OK;
}
