/* What the machine can do at best, measured rather than looked up: a shared or throttled machine is then compared with
 * itself. A large product for arithmetic; copying memory well beyond the caches for bandwidth. */
#include "bench.h"

#include "measure/random_matrices.h"

typedef struct limit_data {
    tch_tensor *a, *b, *out;
} limit_data;

static tch_status run_product(tch_context *context, void *user)
{
    limit_data *d = user;
    return tch_matmul(context, d->a, d->b, d->out);
}

static tch_status run_copy(tch_context *context, void *user)
{
    limit_data *d = user;
    return tch_tensor_copy(context, d->out, d->a);
}

static void release(limit_data *d)
{
    tch_tensor_destroy(d->a);
    tch_tensor_destroy(d->b);
    tch_tensor_destroy(d->out);
}

/* The least time is taken: a limit is what the machine does when nothing disturbs it. */
static tch_status measure_product(const workplace *place, tch_dtype dtype, int64_t n, double seconds, double *flops)
{
    limit_data d = {NULL, NULL, NULL};
    timing time = {0};
    tch_status status;
    if ((status = workplace_matrices(place->device, dtype, 1, n, n, &d.a)) == TCH_OK &&
        (status = workplace_matrices(place->device, dtype, 1, n, n, &d.b)) == TCH_OK &&
        (status = workplace_matrices(place->device, dtype, 1, n, n, &d.out)) == TCH_OK &&
        (status = random_entries(place, 1, d.a)) == TCH_OK && (status = random_entries(place, 2, d.b)) == TCH_OK) {
        status = timing_measure(place->device, run_product, &d, seconds, &time);
    }
    *flops = 2.0 * (double)n * (double)n * (double)n / (1e-3 * time.least_ms);
    release(&d);
    return status;
}

static tch_status measure_copy(const workplace *place, int64_t rows, double seconds, double *bytes_per_second)
{
    const int64_t cols = 8192;
    const double bytes = 4.0 * (double)rows * (double)cols;
    limit_data d = {NULL, NULL, NULL};
    timing time = {0};
    tch_status status;
    if ((status = workplace_matrices(place->device, TCH_FLOAT32, 1, rows, cols, &d.a)) == TCH_OK &&
        (status = workplace_matrices(place->device, TCH_FLOAT32, 1, rows, cols, &d.out)) == TCH_OK &&
        (status = tch_tensor_fill(place->device, d.a, 1.25)) == TCH_OK) {
        status = timing_measure(place->device, run_copy, &d, seconds, &time);
    }
    *bytes_per_second = 2.0 * bytes / (1e-3 * time.least_ms);
    release(&d);
    return status;
}

/* A device with more arithmetic and bandwidth needs more of both to show them: products of 2048 and copies of 256 MiB
 * would last a fraction of a millisecond on a large GPU. */
tch_status bench_limits_measure(const workplace *place, double seconds, bench_results *results)
{
    bench_limits *limits = &results->limits;
    const int64_t n = (results->quick ? 1024 : 2048) * (results->large ? 4 : 1);
    CLI_TRY(measure_product(place, TCH_FLOAT32, n, seconds, &limits->flops_f32));
    CLI_TRY(measure_product(place, TCH_FLOAT64, n, seconds, &limits->flops_f64));
    CLI_TRY(measure_product(place, TCH_BFLOAT16, n, seconds, &limits->flops_bf16));
    CLI_TRY(measure_copy(place, results->large ? 32768 : 8192, seconds, &limits->copy_bytes));
    return tch_memory_trim(place->device, 0); /* gigabytes that no case needs */
}
