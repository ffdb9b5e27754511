/* Operands of the benchmark, equal for equal seeds on every machine and device. A random orthogonal matrix is Q = C S1
 * C S2 C, with C the Hartley transform (symmetric, orthogonal, dense for every n) and S random signs: two matrix
 * products, where Householder vectors would be memory-bound and a decomposition is what is measured. */
#include "bench.h"

#include <math.h>
#include <string.h>

#include "data/dataset.h"

enum { SEED = 1000 };

static tch_status create(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape, tch_tensor **tensor)
{
    return tch_tensor_create_uninitialized(context, dtype, ndim, shape, TCH_CONTIGUOUS, tensor);
}

/* Copies to the device and synchronizes: the caller reuses the source. */
static tch_status send(const bench_contexts *contexts, tch_tensor *out, const tch_tensor *host)
{
    CLI_TRY(tch_tensor_copy(contexts->device, out, host));
    return tch_context_synchronize(contexts->device);
}

/* Independent entries, uniform with mean 0 and variance 1. */
static tch_status fill_random(const bench_contexts *contexts, uint64_t seed, tch_tensor *out)
{
    tch_tensor *host = NULL;
    CLI_TRY(create(contexts->host, TCH_FLOAT64, out->ndim, out->shape, &host));
    double *values = host->data;
    for (int64_t i = 0; i < tch_tensor_numel(host); i++) {
        double unit = (double)(dataset_bits(seed, (uint64_t)i) >> 11) * 0x1p-53;
        values[i] = 1.7320508075688772 * (2.0 * unit - 1.0);
    }
    tch_status status = send(contexts, out, host);
    tch_tensor_destroy(host);
    return status;
}

/* --- symmetric matrices ------------------------------------------------------------------------------------------ */

/* n by n on the host, float64. */
typedef struct builder {
    int64_t n;
    tch_tensor *hartley, *scaled, *q, *a;
} builder;

/* C(j, k) = (cos + sin)(2 pi j k / n) / sqrt(n) */
static void fill_hartley(int64_t n, double *out)
{
    const double turn = 6.28318530717958647692 / (double)n;
    for (int64_t j = 0; j < n; j++) {
        for (int64_t k = 0; k < n; k++) {
            double angle = turn * (double)(j * k % n);
            out[j * n + k] = (cos(angle) + sin(angle)) / sqrt((double)n);
        }
    }
}

/* Sets A = Q diag(w) Q' with w = 1, 2^-a, 3^-a, ... 1e-8, a spectrum as of the factors of trained networks. */
static tch_status build_matrix(tch_context *host, const builder *b, uint64_t seed)
{
    int64_t n = b->n;
    double *scaled = b->scaled->data;
    const double *q = b->hartley->data;
    for (uint64_t pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < n * n; i++) {
            scaled[i] = dataset_bits(seed + pass, (uint64_t)(i % n)) >> 63 ? q[i] : -q[i];
        }
        CLI_TRY(tch_matmul(host, b->scaled, b->hartley, b->q));
        q = b->q->data;
    }
    double power = n > 1 ? log(1e8) / log((double)n) : 0.0;
    for (int64_t j = 0; j < n; j++) {
        double root = pow((double)(j + 1), -0.5 * power);
        for (int64_t i = 0; i < n; i++) {
            scaled[i * n + j] = q[i * n + j] * root;
        }
    }
    return tch_gram(host, 1.0, b->scaled, 0, 0.0, b->a);
}

/* A matrix costs three products on the host; large batches repeat the first ones. */
static tch_status fill_batch(const bench_contexts *contexts, const builder *b, tch_tensor *out)
{
    enum { DISTINCT = 16 };
    uint64_t bytes = (uint64_t)(b->n * b->n) * tch_dtype_size(out->dtype);
    for (int64_t i = 0; i < out->shape[0]; i++) {
        tch_tensor slice = *out, earlier;
        slice.ndim = 2;
        slice.shape = out->shape + 1;
        slice.strides = NULL;
        earlier = slice;
        slice.byte_offset += (uint64_t)i * bytes;
        earlier.byte_offset += (uint64_t)(i % DISTINCT) * bytes;
        if (i < DISTINCT) {
            CLI_TRY(build_matrix(contexts->host, b, SEED + 2 * (uint64_t)i));
        }
        CLI_TRY(send(contexts, &slice, i < DISTINCT ? b->a : &earlier));
    }
    return TCH_OK;
}

static tch_status fill_symmetric(const bench_contexts *contexts, tch_tensor *out)
{
    builder b = {.n = out->shape[2]};
    tch_tensor **tensors[] = {&b.hartley, &b.scaled, &b.q, &b.a};
    tch_status status = TCH_OK;
    for (int i = 0; i < 4 && status == TCH_OK; i++) {
        status = create(contexts->host, TCH_FLOAT64, 2, out->shape + 1, tensors[i]);
    }
    if (status == TCH_OK) {
        fill_hartley(b.n, b.hartley->data);
        status = fill_batch(contexts, &b, out);
    }
    for (int i = 0; i < 4; i++) {
        tch_tensor_destroy(*tensors[i]);
    }
    return status;
}

/* --- the operands of a case -------------------------------------------------------------------------------------- */

static tch_status create_operand(const bench_contexts *contexts, const bench_case *c, tch_dtype dtype,
                                 const char *letters, tch_tensor **tensor)
{
    int64_t shape[3];
    int32_t ndim = 0;
    for (; letters[ndim] != '\0'; ndim++) {
        char letter = letters[ndim];
        shape[ndim] = letter == 'b'   ? c->batch
                      : letter == 'm' ? c->m
                      : letter == 'n' ? c->n
                      : letter == 'k' ? c->k
                                      : c->m * c->n;
    }
    return create(contexts->device, dtype, ndim, shape, tensor);
}

static tch_status add_input(const bench_contexts *contexts, bench_data *d, int index)
{
    const char *shape = d->c->operation->in[index];
    tch_tensor **tensor = &d->in[index];
    bool symmetric = shape[0] == 's', weights = shape[0] == 'w';
    CLI_TRY(
        create_operand(contexts, d->c, weights ? TCH_FLOAT64 : d->c->dtype, shape + (symmetric || weights), tensor));
    if (symmetric) {
        return fill_symmetric(contexts, *tensor);
    }
    return weights ? tch_tensor_fill(contexts->device, *tensor, 0.5)
                   : fill_random(contexts, SEED + (uint64_t)index, *tensor);
}

/* Norms and residuals are float64; gradients and factors of 16-bit layers are float32. */
static tch_status add_output(const bench_contexts *contexts, bench_data *d, int index)
{
    const char *shape = d->c->operation->out[index];
    bool of_layer = strstr(d->c->size, "-to-") != NULL;
    tch_dtype dtype = strcmp(shape, "b") == 0              ? TCH_FLOAT64
                      : of_layer && d->c->dtype.bits == 16 ? TCH_FLOAT32
                                                           : d->c->dtype;
    CLI_TRY(create_operand(contexts, d->c, dtype, shape, &d->out[index]));
    return tch_tensor_fill(contexts->device, d->out[index], (double)NAN);
}

static tch_status create_operands(const bench_contexts *contexts, bench_data *d)
{
    const bench_operation *operation = d->c->operation;
    for (int i = 0; i < 3 && operation->in[i] != NULL; i++) {
        CLI_TRY(add_input(contexts, d, i));
    }
    for (int i = 0; i < 2 && operation->out[i] != NULL; i++) {
        CLI_TRY(add_output(contexts, d, i));
    }
    return d->c->damping > 0.0 ? create_operand(contexts, d->c, TCH_INT32, "b", &d->report) : TCH_OK;
}

tch_status bench_prepare(const bench_contexts *contexts, const bench_case *c, bench_data *data)
{
    *data = (bench_data){.c = c};
    tch_status status = create_operands(contexts, data);
    if (status != TCH_OK) {
        bench_release(data);
    }
    return status;
}

void bench_release(bench_data *data)
{
    for (int i = 0; i < 3; i++) {
        tch_tensor_destroy(data->in[i]);
    }
    for (int i = 0; i < 2; i++) {
        tch_tensor_destroy(data->out[i]);
    }
    tch_tensor_destroy(data->report);
}

/* --- results ----------------------------------------------------------------------------------------------------- */

/* Copies to the host, converted to `dtype`. */
static tch_status fetch(const bench_contexts *contexts, tch_dtype dtype, const tch_tensor *tensor, tch_tensor **host)
{
    *host = NULL;
    CLI_TRY(create(contexts->host, dtype, tensor->ndim, tensor->shape, host));
    return send(contexts, *host, tensor);
}

tch_root_config bench_root_config(const bench_case *c)
{
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.method = c->method;
    config.relative_eps = c->damping;
    return config;
}

/* NaN propagates. */
static void judge_root(tch_report report, double residual, bench_verdict *verdict)
{
    if (report != TCH_REPORT_OK) {
        verdict->reason = verdict->failed == 0 ? report : verdict->reason;
        verdict->failed++;
    } else if (!(residual <= verdict->residual)) {
        verdict->residual = isnan(verdict->residual) ? verdict->residual : residual;
    }
}

static tch_status judge_roots(const bench_contexts *contexts, const bench_data *data, bench_verdict *verdict)
{
    tch_tensor *residual = NULL, *report = NULL;
    tch_status status = fetch(contexts, TCH_FLOAT64, data->out[1], &residual);
    if (status == TCH_OK && (status = fetch(contexts, TCH_INT32, data->report, &report)) == TCH_OK) {
        for (int64_t i = 0; i < data->c->batch; i++) {
            judge_root((tch_report)((const int32_t *)report->data)[i], ((const double *)residual->data)[i], verdict);
        }
    }
    tch_tensor_destroy(residual);
    tch_tensor_destroy(report);
    return status;
}

tch_status bench_judge(const bench_contexts *contexts, const bench_data *data, bench_verdict *verdict)
{
    *verdict = (bench_verdict){0, TCH_REPORT_OK, 0.0};
    if (data->report != NULL) {
        return judge_roots(contexts, data, verdict);
    }
    bool finite = true;
    for (int i = 0; i < 2 && data->out[i] != NULL; i++) {
        tch_tensor *host = NULL;
        tch_status status = fetch(contexts, TCH_FLOAT64, data->out[i], &host);
        for (int64_t j = 0; status == TCH_OK && j < tch_tensor_numel(host); j++) {
            finite = finite && isfinite(((const double *)host->data)[j]);
        }
        tch_tensor_destroy(host);
        CLI_TRY(status);
    }
    return finite ? TCH_OK : TCH_ERR_NUMERIC;
}
