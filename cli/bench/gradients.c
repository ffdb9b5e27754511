/* Per-sample gradients and the factors of KFAC, of a linear layer: `batch` samples with k positions each, n inputs, m
 * outputs. What is written is counted where the gradients themselves are, elsewhere the arithmetic of the cheaper
 * form. */
#include "bench.h"

static const tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);

static tch_status add_layer(const workplace *place, bench_data *d)
{
    CLI_TRY(bench_add_random(place, d, 0, d->c->k, d->c->n));
    return bench_add_random(place, d, 1, d->c->k, d->c->m);
}

/* Results of half inputs are float32. */
static tch_status add_result(const workplace *place, bench_data *d, int index, int32_t ndim, const int64_t *shape)
{
    tch_dtype dtype = d->c->dtype.bits == 16 ? TCH_FLOAT32 : d->c->dtype;
    tch_status status =
        tch_tensor_create_uninitialized(place->device, dtype, ndim, shape, TCH_CONTIGUOUS, &d->out[index]);
    return status ? status : workplace_poison(place, d->out[index]);
}

static tch_status samples_prepare(const workplace *place, bench_data *d)
{
    const int64_t weight[] = {d->c->batch, d->c->m, d->c->n}, bias[] = {d->c->batch, d->c->m};
    CLI_TRY(add_layer(place, d));
    CLI_TRY(add_result(place, d, 0, 3, weight));
    return add_result(place, d, 1, 2, bias);
}

static tch_status samples_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_grad_samples(context, &layer, d->in[0], d->in[1], d->out[0], d->out[1]);
}

static double samples_bytes(const bench_case *c)
{
    return (double)c->batch * (double)c->m * (double)(c->n + 1) * (double)tch_dtype_size(c->dtype);
}

static tch_status norms_prepare(const workplace *place, bench_data *d)
{
    CLI_TRY(add_layer(place, d));
    CLI_TRY(workplace_vector(place->device, TCH_FLOAT64, d->c->batch, &d->out[0]));
    return workplace_poison(place, d->out[0]);
}

static tch_status norms_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_grad_norms(context, &layer, d->in[0], d->in[1], TCH_GRAD_BOTH, 0, d->out[0]);
}

/* Inner products of positions, half of them for symmetry, or the gradient itself. */
static double norms_flops(const bench_case *c)
{
    double m = (double)c->m, n = (double)c->n, k = (double)c->k;
    double gram = k * (k + 1.0) * (m + n), tiles = 2.0 * k * m * n;
    return (double)c->batch * (gram < tiles ? gram : tiles);
}

static tch_status weighted_prepare(const workplace *place, bench_data *d)
{
    const int64_t weight[] = {d->c->m, d->c->n};
    CLI_TRY(add_layer(place, d));
    CLI_TRY(workplace_vector(place->device, TCH_FLOAT64, d->c->batch, &d->in[2]));
    CLI_TRY(tch_tensor_fill(place->device, d->in[2], 0.5));
    CLI_TRY(add_result(place, d, 0, 2, weight));
    return add_result(place, d, 1, 1, weight);
}

static tch_status weighted_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_grad_weighted_sum(context, &layer, d->in[0], d->in[1], d->in[2], 0.0, d->out[0], d->out[1]);
}

static double weighted_flops(const bench_case *c)
{
    return 2.0 * (double)c->batch * (double)c->k * (double)c->m * (double)c->n;
}

static tch_status factors_prepare(const workplace *place, bench_data *d)
{
    const int64_t input[] = {d->c->n, d->c->n}, output[] = {d->c->m, d->c->m};
    CLI_TRY(add_layer(place, d));
    CLI_TRY(add_result(place, d, 0, 2, input));
    return add_result(place, d, 1, 2, output);
}

static tch_status factors_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_grad_factors(context, &layer, d->in[0], d->in[1], 0, TCH_SHARING_EXPAND, 1.0, 0.0, d->out[0], d->out[1]);
}

static double factors_flops(const bench_case *c)
{
    double m = (double)c->m, n = (double)c->n;
    return (double)c->batch * (double)c->k * (m * (m + 1.0) + n * (n + 1.0));
}

const bench_operation bench_sample_gradients = {
    "sample_gradients", "the gradient of every sample", samples_prepare, samples_run, NULL, samples_bytes, 1};
const bench_operation bench_sample_norms = {
    "sample_norms", "the norm of every sample's gradient", norms_prepare, norms_run, norms_flops, NULL, 1};
const bench_operation bench_weighted_sum = {
    "weighted_sum", "the sum of weighted gradients", weighted_prepare, weighted_run, weighted_flops, NULL, 1};
const bench_operation bench_factors = {
    "kfac_factors", "A'A and G'G", factors_prepare, factors_run, factors_flops, NULL, 1};
