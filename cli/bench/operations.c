/* How each operation is set up, run and counted. The counts are of the arithmetic that the result needs when it is
 * computed in the plain way (half for symmetric results); where the work depends on the method there is no count, and
 * only the time speaks. */
#include "bench.h"

#include <math.h>

/* Inputs that need a spectrum are nearly singular, so that the damping decides the conditioning. */
static const double spectrum_condition = 1e8;

static tch_status add_output(const workplace *place, bench_data *d, int index, int64_t rows, int64_t cols)
{
    CLI_TRY(workplace_matrices(place->device, d->c->dtype, d->c->batch, rows, cols, &d->out[index]));
    return workplace_poison(place, d->out[index]);
}

/* --- products: [m, k] times [k, n] --- */

static tch_status matmul_prepare(const workplace *place, bench_data *d)
{
    const bench_case *c = d->c;
    CLI_TRY(bench_add_random(place, d, 0, c->m, c->k));
    CLI_TRY(bench_add_random(place, d, 1, c->k, c->n));
    return add_output(place, d, 0, c->m, c->n);
}

static tch_status matmul_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_matmul(context, d->in[0], d->in[1], d->out[0]);
}

static double matmul_flops(const bench_case *c)
{
    return 2.0 * (double)c->batch * (double)c->m * (double)c->n * (double)c->k;
}

/* The budget is an eighth of what widening one operand whole would take, so that the product must go in chunks. */
static tch_status chunked_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_matmul_chunked(context, d->in[0], d->in[1], d->c->m * d->c->k * 4 / 8, d->out[0]);
}

/* n by n, both symmetric and commuting */
static tch_status symmetric_prepare(const workplace *place, bench_data *d)
{
    CLI_TRY(bench_add_symmetric(place, d, 0, d->c->n, 1e2));
    CLI_TRY(bench_add_symmetric(place, d, 1, d->c->n, 1e3));
    return add_output(place, d, 0, d->c->n, d->c->n);
}

static tch_status symmetric_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_symmetric_product(context, d->in[0], d->in[1], d->out[0]);
}

/* A A' of A [m, k]; also the count of a symmetric product, with k = n = m */
static double gram_flops(const bench_case *c)
{
    return (double)c->batch * (double)c->m * (double)(c->m + 1) * (double)c->k;
}

static tch_status gram_prepare(const workplace *place, bench_data *d)
{
    CLI_TRY(bench_add_random(place, d, 0, d->c->m, d->c->k));
    return add_output(place, d, 0, d->c->m, d->c->m);
}

static tch_status gram_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_gram(context, 1.0 / (double)d->c->k, d->in[0], 0, 0.0, d->out[0]);
}

/* --- functions of a symmetric matrix: n by n --- */

static tch_status eigh_prepare(const workplace *place, bench_data *d)
{
    CLI_TRY(bench_add_symmetric(place, d, 0, d->c->n, spectrum_condition));
    const int64_t shape[] = {d->c->batch, d->c->n};
    CLI_TRY(add_output(place, d, 0, d->c->n, d->c->n));
    CLI_TRY(tch_tensor_create_uninitialized(place->device, d->c->dtype, 2, shape, TCH_CONTIGUOUS, &d->out[1]));
    return workplace_poison(place, d->out[1]);
}

static tch_status eigh_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_eigh(context, d->in[0], d->out[1], d->out[0], NULL);
}

static tch_status power_prepare(const workplace *place, bench_data *d)
{
    CLI_TRY(bench_add_symmetric(place, d, 0, d->c->n, spectrum_condition));
    return add_output(place, d, 0, d->c->n, d->c->n);
}

static tch_status power_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_matrix_power(context, d->in[0], -0.25, 1e-6, d->out[0], NULL);
}

static tch_status root_prepare(const workplace *place, bench_data *d)
{
    CLI_TRY(bench_add_symmetric(place, d, 0, d->c->n, spectrum_condition));
    CLI_TRY(root_trial_start(place, d->in[0], &d->trial));
    d->trial.config.method = d->c->method;
    d->trial.config.relative_eps = d->c->damping;
    return TCH_OK;
}

static tch_status root_run(tch_context *context, void *data)
{
    return root_trial_run(context, &((bench_data *)data)->trial);
}

/* --- orthogonalization: m by n --- */

static tch_status ortho_prepare(const workplace *place, bench_data *d)
{
    CLI_TRY(bench_add_random(place, d, 0, d->c->m, d->c->n));
    return add_output(place, d, 0, d->c->m, d->c->n);
}

static tch_status ortho_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_orthogonalize(context, d->in[0], 5, TCH_ORTHO_POLAR_EXPRESS, d->out[0]);
}

/* Five steps on the short side s: a Gram matrix and its square, half each, and one product. */
static double ortho_flops(const bench_case *c)
{
    double s = (double)(c->m < c->n ? c->m : c->n), l = (double)(c->m < c->n ? c->n : c->m);
    return 5.0 * (double)c->batch * (s * s * l + s * s * s + 2.0 * s * s * l);
}

/* --- Kronecker algebra: A is m by m, B is n by n --- */

static tch_status kron_prepare(const workplace *place, bench_data *d)
{
    const bench_case *c = d->c;
    CLI_TRY(bench_add_random(place, d, 0, c->m, c->m));
    CLI_TRY(bench_add_random(place, d, 1, c->n, c->n));
    return add_output(place, d, 0, c->m * c->n, c->m * c->n);
}

static tch_status kron_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_kronecker_product(context, d->in[0], d->in[1], d->out[0]);
}

static double kron_bytes(const bench_case *c)
{
    double side = (double)(c->m * c->n);
    return (double)c->batch * side * side * (double)tch_dtype_size(c->dtype);
}

/* X is [m n, k] */
static tch_status kron_matmul_prepare(const workplace *place, bench_data *d)
{
    const bench_case *c = d->c;
    CLI_TRY(bench_add_random(place, d, 0, c->m, c->m));
    CLI_TRY(bench_add_random(place, d, 1, c->n, c->n));
    CLI_TRY(bench_add_random(place, d, 2, c->m * c->n, c->k));
    return add_output(place, d, 0, c->m * c->n, c->k);
}

static tch_status kron_matmul_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_kronecker_matmul(context, d->in[0], d->in[1], d->in[2], d->out[0]);
}

static double kron_matmul_flops(const bench_case *c)
{
    return 2.0 * (double)c->batch * (double)c->k * (double)(c->m * c->n) * (double)(c->m + c->n);
}

/* X is [m, n] */
static tch_status kron_solve_prepare(const workplace *place, bench_data *d)
{
    const bench_case *c = d->c;
    CLI_TRY(bench_add_symmetric(place, d, 0, c->m, spectrum_condition));
    CLI_TRY(bench_add_symmetric(place, d, 1, c->n, spectrum_condition));
    CLI_TRY(bench_add_random(place, d, 2, c->m, c->n));
    return add_output(place, d, 0, c->m, c->n);
}

static tch_status kron_solve_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_kronecker_solve(context, d->in[0], d->in[1], d->in[2], 1e-3, d->out[0], NULL);
}

/* Two Cholesky factorizations and two triangular solves with each. */
static double kron_solve_flops(const bench_case *c)
{
    double m = (double)c->m, n = (double)c->n;
    return (double)c->batch * ((m * m * m + n * n * n) / 3.0 + 2.0 * m * n * (m + n));
}

/* M is [m n, m n] */
static tch_status nearest_prepare(const workplace *place, bench_data *d)
{
    const bench_case *c = d->c;
    CLI_TRY(bench_add_random(place, d, 0, c->m * c->n, c->m * c->n));
    CLI_TRY(add_output(place, d, 0, c->m, c->m));
    return add_output(place, d, 1, c->n, c->n);
}

static tch_status nearest_run(tch_context *context, void *data)
{
    bench_data *d = data;
    return tch_nearest_kronecker(context, d->in[0], d->out[0], d->out[1], NULL);
}

static const bench_operation matmul = {"matmul", "A B", matmul_prepare, matmul_run, matmul_flops, NULL, 1};
static const bench_operation symmetric = {
    "symmetric_product", "A B, known to be symmetric", symmetric_prepare, symmetric_run, gram_flops, NULL, 1};
static const bench_operation gram = {"gram", "A A'", gram_prepare, gram_run, gram_flops, NULL, 1};
static const bench_operation chunked = {
    "matmul_chunked", "A B within a memory budget", matmul_prepare, chunked_run, matmul_flops, NULL, 1};
static const bench_operation eigh = {"eigh", "A = V diag(w) V'", eigh_prepare, eigh_run, NULL, NULL, 15};
static const bench_operation power = {
    "matrix_power", "A^(-0.25) by eigendecomposition", power_prepare, power_run, NULL, NULL, 17};
static const bench_operation root = {"inverse_root", "A^(-1/4)", root_prepare, root_run, NULL, NULL, 17};
static const bench_operation ortho = {
    "orthogonalize", "five Newton-Schulz steps", ortho_prepare, ortho_run, ortho_flops, NULL, 8};
static const bench_operation kron = {"kronecker_product", "A (x) B", kron_prepare, kron_run, NULL, kron_bytes, 1};
static const bench_operation kron_matmul = {
    "kronecker_matmul", "(A (x) B) X, not formed", kron_matmul_prepare, kron_matmul_run, kron_matmul_flops, NULL, 1};
static const bench_operation kron_solve = {
    "kronecker_solve", "damped A^-1 X B^-1", kron_solve_prepare, kron_solve_run, kron_solve_flops, NULL, 2};
static const bench_operation nearest = {
    "nearest_kronecker", "the A (x) B nearest to M", nearest_prepare, nearest_run, NULL, NULL, 1};

const bench_operation *const bench_operations[] = {
    &matmul,
    &symmetric,
    &gram,
    &chunked,
    &eigh,
    &power,
    &root,
    &ortho,
    &kron,
    &kron_matmul,
    &kron_solve,
    &nearest,
    &bench_sample_gradients,
    &bench_sample_norms,
    &bench_weighted_sum,
    &bench_factors,
    NULL,
};

tch_status bench_prepare(const workplace *place, const bench_case *c, bench_data *data)
{
    *data = (bench_data){.c = c};
    tch_status status = c->operation->prepare(place, data);
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
    root_trial_end(&data->trial);
    *data = (bench_data){0};
}

static tch_status all_finite(const workplace *place, const tch_tensor *output, bool *good)
{
    tch_tensor *host = NULL;
    CLI_TRY(workplace_fetch(place, output, &host));
    int64_t count = tch_tensor_numel(host);
    for (int64_t i = 0; i < count && *good; i++) {
        *good = isfinite(workplace_entry(host, i));
    }
    tch_tensor_destroy(host);
    return TCH_OK;
}

tch_status bench_check(const workplace *place, const bench_data *data, bool *good)
{
    *good = true;
    for (int i = 0; i < 2; i++) {
        if (data->out[i] != NULL) {
            CLI_TRY(all_finite(place, data->out[i], good));
        }
    }
    return TCH_OK;
}
