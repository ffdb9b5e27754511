/* The operations and the sizes they are measured at. To measure another size, add it to a list; another operation is an
 * entry of the table and a list. Work is counted as the arithmetic of the plain way (half for symmetric results); where
 * it depends on the method there is no count. */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- sizes ------------------------------------------------------------------------------------------------------- */

/* A GPU is not busy with less than LARGE, and a CPU would be for too long. */
#define SINGLE "32 64* 128* 256* 512* 1024 2048 "
#define BATCHES "4x128 16x128* 64x128 256x128 64x256 16x1024 "
#define LARGE "1024x128+ 4x2048+ 4096+"
/* Samples, positions, inputs, outputs: two layers of a small language model. */
#define LAYERS "32x64-768-to-768 32x256-768-to-3072+"

const bench_list bench_lists[] = {
    {"matmul", 32, SINGLE BATCHES LARGE},
    {"matmul", 64, "256 512* 1024 2048"},
    {"symmetric_product", 32, SINGLE "64x256 16x1024 4x2048+"},
    {"symmetric_product", 64, "512* 1024 2048"},
    {"symmetric_product", 16, "16x1024+ 4x2048+"},
    {"gram", 32, "256-by-1024* 768-by-3072* 1024-by-4096 4096-by-16384+"},
    {"gram", 64, "768-by-3072*"},
    {"matmul_chunked", 32, "512* 1024 4096+"},
    {"matmul_chunked", 16, "512* 1024 4096+"},
    {"eigh", 32, SINGLE BATCHES LARGE},
    {"eigh", 64, "256* 512* 1024"},
    {"matrix_power", 32, SINGLE "64x256 16x1024 4x2048+"},
    {"matrix_power", 64, "256* 512* 1024"},
    {"inverse_root", 32, SINGLE BATCHES LARGE},
    {"inverse_root", 64, "256* 512* 1024"},
    {"orthogonalize", 32, "256-by-256* 1024-by-1024 768-by-3072* 4096-by-4096+"},
    {"kronecker_product", 32, "32-kron-64* 64-kron-128*"},
    {"kronecker_product", 64, "64-kron-128"},
    {"kronecker_matmul", 32, "64-kron-128-by-16* 256-kron-512-by-16"},
    {"kronecker_solve", 32, "64-kron-128* 256-kron-512* 768-kron-768 2048-kron-2048+"},
    {"kronecker_solve", 64, "256-kron-512*"},
    {"nearest_kronecker", 32, "16-kron-32* 32-kron-64"},
    {"sample_gradients", 32, "64x1-256-to-256* 16x64-256-to-256* 256x1-512-to-512 256x1-1024-to-1024+"},
    {"sample_norms", 32, "16x64-256-to-512* " LAYERS},
    {"sample_norms", 16, LAYERS},
    {"weighted_sum", 32, "16x64-256-to-512* " LAYERS},
    {"weighted_sum", 16, LAYERS},
    {"kfac_factors", 32, "16x64-256-to-512* " LAYERS},
    {"kfac_factors", 16, LAYERS},
};
const int bench_list_count = sizeof bench_lists / sizeof bench_lists[0];

static void read_size(bench_case *c)
{
    int64_t numbers[4] = {0};
    const char *at = c->size;
    for (int i = 0; i < 4 && *at != '\0'; i++) {
        char *end;
        numbers[i] = strtoll(at, &end, 10);
        at = end + strcspn(end, "0123456789");
    }
    c->batch = 1;
    if (strstr(c->size, "-to-") != NULL) {
        c->batch = numbers[0], c->k = numbers[1], c->n = numbers[2], c->m = numbers[3];
    } else if (strstr(c->size, "-kron-") != NULL) {
        c->m = numbers[0], c->n = numbers[1], c->k = numbers[2];
    } else if (strstr(c->size, "-by-") != NULL) {
        c->m = numbers[0], c->n = c->k = numbers[1];
    } else if (numbers[1] > 0) {
        c->batch = numbers[0], c->m = c->n = c->k = numbers[1];
    } else {
        c->m = c->n = c->k = numbers[0];
    }
}

/* --- running and counting ---------------------------------------------------------------------------------------- */

static const tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);

static tch_status matmul_run(tch_context *context, const bench_data *d)
{
    return tch_matmul(context, d->in[0], d->in[1], d->out[0]);
}

static double matmul_flops(const bench_case *c)
{
    return 2.0 * (double)c->batch * (double)c->m * (double)c->n * (double)c->k;
}

/* The budget is an eighth of what widening one operand whole would take, so that the product must go in chunks. */
static tch_status chunked_run(tch_context *context, const bench_data *d)
{
    return tch_matmul_chunked(context, d->in[0], d->in[1], d->c->m * d->c->k * 4 / 8, d->out[0]);
}

static tch_status symmetric_run(tch_context *context, const bench_data *d)
{
    return tch_symmetric_product(context, d->in[0], d->in[1], d->out[0]);
}

static tch_status gram_run(tch_context *context, const bench_data *d)
{
    return tch_gram(context, 1.0 / (double)d->c->k, d->in[0], 0, 0.0, d->out[0]);
}

/* A A' of A [m, k]; also the count of a symmetric product, with k = n = m */
static double gram_flops(const bench_case *c)
{
    return (double)c->batch * (double)c->m * (double)(c->m + 1) * (double)c->k;
}

static tch_status eigh_run(tch_context *context, const bench_data *d)
{
    return tch_eigh(context, d->in[0], d->out[1], d->out[0], NULL);
}

static tch_status power_run(tch_context *context, const bench_data *d)
{
    return tch_matrix_power(context, d->in[0], -0.25, 1e-6, d->out[0], NULL);
}

static tch_status root_run(tch_context *context, const bench_data *d)
{
    const tch_root_config config = bench_root_config(d->c);
    return tch_inverse_root(context, d->in[0], BENCH_ROOT, &config, d->out[0], d->out[1], d->report);
}

static tch_status ortho_run(tch_context *context, const bench_data *d)
{
    return tch_orthogonalize(context, d->in[0], 5, TCH_ORTHO_POLAR_EXPRESS, d->out[0]);
}

/* Five steps on the short side s: a Gram matrix and its square, half each, and one product. */
static double ortho_flops(const bench_case *c)
{
    double s = (double)(c->m < c->n ? c->m : c->n), l = (double)(c->m < c->n ? c->n : c->m);
    return 5.0 * (double)c->batch * (s * s * l + s * s * s + 2.0 * s * s * l);
}

static tch_status kron_run(tch_context *context, const bench_data *d)
{
    return tch_kronecker_product(context, d->in[0], d->in[1], d->out[0]);
}

static double kron_bytes(const bench_case *c)
{
    double side = (double)(c->m * c->n);
    return (double)c->batch * side * side * (double)tch_dtype_size(c->dtype);
}

static tch_status kron_matmul_run(tch_context *context, const bench_data *d)
{
    return tch_kronecker_matmul(context, d->in[0], d->in[1], d->in[2], d->out[0]);
}

static double kron_matmul_flops(const bench_case *c)
{
    return 2.0 * (double)c->batch * (double)c->k * (double)(c->m * c->n) * (double)(c->m + c->n);
}

static tch_status kron_solve_run(tch_context *context, const bench_data *d)
{
    return tch_kronecker_solve(context, d->in[0], d->in[1], d->in[2], 1e-3, d->out[0], NULL);
}

/* Two Cholesky factorizations and two triangular solves with each. */
static double kron_solve_flops(const bench_case *c)
{
    double m = (double)c->m, n = (double)c->n;
    return (double)c->batch * ((m * m * m + n * n * n) / 3.0 + 2.0 * m * n * (m + n));
}

static tch_status nearest_run(tch_context *context, const bench_data *d)
{
    return tch_nearest_kronecker(context, d->in[0], d->out[0], d->out[1], NULL);
}

static tch_status samples_run(tch_context *context, const bench_data *d)
{
    return tch_grad_samples(context, &layer, d->in[0], d->in[1], d->out[0], d->out[1]);
}

static double samples_bytes(const bench_case *c)
{
    return (double)c->batch * (double)c->m * (double)(c->n + 1) * (double)tch_dtype_size(c->dtype);
}

static tch_status norms_run(tch_context *context, const bench_data *d)
{
    return tch_grad_norms(context, &layer, d->in[0], d->in[1], TCH_GRAD_BOTH, 0, d->out[0]);
}

/* Inner products of positions, half of them for symmetry, or the gradient itself. */
static double norms_flops(const bench_case *c)
{
    double m = (double)c->m, n = (double)c->n, k = (double)c->k;
    double gram = k * (k + 1.0) * (m + n), tiles = 2.0 * k * m * n;
    return (double)c->batch * (gram < tiles ? gram : tiles);
}

static tch_status weighted_run(tch_context *context, const bench_data *d)
{
    return tch_grad_weighted_sum(context, &layer, d->in[0], d->in[1], d->in[2], 0.0, d->out[0], d->out[1]);
}

static tch_status factors_run(tch_context *context, const bench_data *d)
{
    return tch_grad_factors(context, &layer, d->in[0], d->in[1], 0, TCH_SHARING_EXPAND, 1.0, 0.0, d->out[0], d->out[1]);
}

static double factors_flops(const bench_case *c)
{
    double m = (double)c->m, n = (double)c->n;
    return (double)c->batch * (double)c->k * (m * (m + 1.0) + n * (n + 1.0));
}

/* clang-format off */
static const bench_operation operations[] = {
    {"matmul", "A B", {"bmk", "bkn"}, {"bmn"}, matmul_run, matmul_flops, NULL},
    {"symmetric_product", "A B, known to be symmetric", {"sbnn", "sbnn"}, {"bnn"}, symmetric_run, gram_flops, NULL},
    {"gram", "A A'", {"bmk"}, {"bmm"}, gram_run, gram_flops, NULL},
    {"matmul_chunked", "A B within a memory budget", {"bmk", "bkn"}, {"bmn"}, chunked_run, matmul_flops, NULL},
    {"eigh", "A = V diag(w) V'", {"sbnn"}, {"bnn", "bn"}, eigh_run, NULL, NULL},
    {"matrix_power", "A^(-0.25) by eigendecomposition", {"sbnn"}, {"bnn"}, power_run, NULL, NULL},
    {"inverse_root", "A^(-1/4)", {"sbnn"}, {"bnn", "b"}, root_run, NULL, NULL},
    {"orthogonalize", "five Newton-Schulz steps", {"bmn"}, {"bmn"}, ortho_run, ortho_flops, NULL},
    {"kronecker_product", "A (x) B", {"bmm", "bnn"}, {"bpp"}, kron_run, NULL, kron_bytes},
    {"kronecker_matmul", "(A (x) B) X, not formed", {"bmm", "bnn", "bpk"}, {"bpk"},
     kron_matmul_run, kron_matmul_flops, NULL},
    {"kronecker_solve", "damped A^-1 X B^-1", {"sbmm", "sbnn", "bmn"}, {"bmn"}, kron_solve_run, kron_solve_flops, NULL},
    {"nearest_kronecker", "the A (x) B nearest to M", {"bpp"}, {"bmm", "bnn"}, nearest_run, NULL, NULL},
    {"sample_gradients", "the gradient of every sample", {"bkn", "bkm"}, {"bmn", "bm"},
     samples_run, NULL, samples_bytes},
    {"sample_norms", "the norm of every sample's gradient", {"bkn", "bkm"}, {"b"}, norms_run, norms_flops, NULL},
    {"weighted_sum", "the sum of weighted gradients", {"bkn", "bkm", "wb"}, {"mn", "m"},
     weighted_run, matmul_flops, NULL},
    {"kfac_factors", "A'A and G'G", {"bkn", "bkm"}, {"nn", "mm"}, factors_run, factors_flops, NULL},
};
/* clang-format on */

static const bench_operation *find_operation(const char *name)
{
    const bench_operation *found = operations;
    while (strcmp(found->name, name) != 0) {
        found++;
    }
    return found;
}

bench_case bench_case_of(const bench_list *list, const char *size, tch_root_method method, double damping)
{
    bench_case c = {.operation = find_operation(list->operation), .method = method, .damping = damping};
    c.dtype = list->bits == 16 ? TCH_BFLOAT16 : list->bits == 64 ? TCH_FLOAT64 : TCH_FLOAT32;
    snprintf(c.size, sizeof c.size, "%.*s", (int)strcspn(size, "*+ "), size);
    read_size(&c);
    if (damping > 0.0) {
        snprintf(c.name, sizeof c.name, "%s/%s/%s/%s/%.0e", list->operation, tch_root_method_name(method), c.size,
                 tch_dtype_name(c.dtype), damping);
    } else {
        snprintf(c.name, sizeof c.name, "%s/%s/%s", list->operation, c.size, tch_dtype_name(c.dtype));
    }
    return c;
}
