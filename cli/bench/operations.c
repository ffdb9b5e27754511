/* The operations and their sizes. A new size is an entry of a list; a new operation is an entry of the table and a
 * list. Operations are counted for the textbook algorithm (half for symmetric results), and not where the count depends
 * on the method. */
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- sizes ------------------------------------------------------------------------------------------------------- */

/* LARGE sizes fill a GPU and take too long on a CPU. */
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

tch_status bench_run(tch_context *context, const bench_data *d)
{
    static const tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    const bench_case *c = d->c;
    tch_tensor *const *in = d->in, *const *out = d->out;
    switch (c->operation->kind) {
    case OP_MATMUL:
        return tch_matmul(context, in[0], in[1], out[0]);
    case OP_SYMMETRIC:
        return tch_symmetric_product(context, in[0], in[1], out[0]);
    case OP_GRAM:
        return tch_gram(context, 1.0 / (double)c->k, in[0], 0, 0.0, out[0]);
    case OP_CHUNKED: /* 1/8 of a widened operand: the product is computed in chunks */
        return tch_matmul_chunked(context, in[0], in[1], c->m * c->k * 4 / 8, out[0]);
    case OP_EIGH:
        return tch_eigh(context, in[0], out[1], out[0], NULL);
    case OP_POWER:
        return tch_matrix_power(context, in[0], -0.25, 1e-6, out[0], NULL);
    case OP_ROOT: {
        const tch_root_config config = bench_root_config(c);
        return tch_inverse_root(context, in[0], BENCH_ROOT, &config, out[0], out[1], d->report);
    }
    case OP_ORTHOGONALIZE:
        return tch_orthogonalize(context, in[0], 5, TCH_ORTHO_POLAR_EXPRESS, out[0]);
    case OP_KRONECKER:
        return tch_kronecker_product(context, in[0], in[1], out[0]);
    case OP_KRONECKER_MATMUL:
        return tch_kronecker_matmul(context, in[0], in[1], in[2], out[0]);
    case OP_KRONECKER_SOLVE:
        return tch_kronecker_solve(context, in[0], in[1], in[2], 1e-3, out[0], NULL);
    case OP_NEAREST:
        return tch_nearest_kronecker(context, in[0], out[0], out[1], NULL);
    case OP_SAMPLES:
        return tch_grad_samples(context, &layer, in[0], in[1], out[0], out[1]);
    case OP_NORMS:
        return tch_grad_norms(context, &layer, in[0], in[1], TCH_GRAD_BOTH, 0, out[0]);
    case OP_WEIGHTED_SUM:
        return tch_grad_weighted_sum(context, &layer, in[0], in[1], in[2], 0.0, out[0], out[1]);
    case OP_FACTORS:
        return tch_grad_factors(context, &layer, in[0], in[1], 0, TCH_SHARING_EXPAND, 1.0, 0.0, out[0], out[1]);
    }
    return TCH_ERR_INTERNAL;
}

double bench_flops(const bench_case *c)
{
    double b = (double)c->batch, m = (double)c->m, n = (double)c->n, k = (double)c->k;
    double shorter = fmin(m, n), longer = fmax(m, n);
    switch (c->operation->kind) {
    case OP_MATMUL:
    case OP_CHUNKED:
    case OP_WEIGHTED_SUM:
        return 2.0 * b * m * n * k;
    case OP_SYMMETRIC: /* with k = n = m */
    case OP_GRAM:
        return b * m * (m + 1.0) * k;
    case OP_ORTHOGONALIZE: /* five steps: a Gram matrix and its square, half each, and one product */
        return 5.0 * b * shorter * shorter * (3.0 * longer + shorter);
    case OP_KRONECKER_MATMUL:
        return 2.0 * b * k * m * n * (m + n);
    case OP_KRONECKER_SOLVE: /* two Cholesky factorizations and two triangular solves with each */
        return b * ((m * m * m + n * n * n) / 3.0 + 2.0 * m * n * (m + n));
    case OP_NORMS: /* inner products of positions, half of them for symmetry, or the gradient itself */
        return b * fmin(k * (k + 1.0) * (m + n), 2.0 * k * m * n);
    case OP_FACTORS:
        return b * k * (m * (m + 1.0) + n * (n + 1.0));
    default:
        return 0.0;
    }
}

double bench_bytes(const bench_case *c)
{
    double b = (double)c->batch * (double)tch_dtype_size(c->dtype), m = (double)c->m, n = (double)c->n;
    return c->operation->kind == OP_KRONECKER ? b * m * m * n * n
           : c->operation->kind == OP_SAMPLES ? b * m * (n + 1.0)
                                              : 0.0;
}

static const bench_operation operations[] = {
    {OP_MATMUL, "matmul", "A B", {"bmk", "bkn"}, {"bmn"}},
    {OP_SYMMETRIC, "symmetric_product", "A B, known to be symmetric", {"sbnn", "sbnn"}, {"bnn"}},
    {OP_GRAM, "gram", "A A'", {"bmk"}, {"bmm"}},
    {OP_CHUNKED, "matmul_chunked", "A B within a memory budget", {"bmk", "bkn"}, {"bmn"}},
    {OP_EIGH, "eigh", "A = V diag(w) V'", {"sbnn"}, {"bnn", "bn"}},
    {OP_POWER, "matrix_power", "A^(-0.25) by eigendecomposition", {"sbnn"}, {"bnn"}},
    {OP_ROOT, "inverse_root", "A^(-1/4)", {"sbnn"}, {"bnn", "b"}},
    {OP_ORTHOGONALIZE, "orthogonalize", "five Newton-Schulz steps", {"bmn"}, {"bmn"}},
    {OP_KRONECKER, "kronecker_product", "A (x) B", {"bmm", "bnn"}, {"bpp"}},
    {OP_KRONECKER_MATMUL, "kronecker_matmul", "(A (x) B) X, not formed", {"bmm", "bnn", "bpk"}, {"bpk"}},
    {OP_KRONECKER_SOLVE, "kronecker_solve", "damped A^-1 X B^-1", {"sbmm", "sbnn", "bmn"}, {"bmn"}},
    {OP_NEAREST, "nearest_kronecker", "the A (x) B nearest to M", {"bpp"}, {"bmm", "bnn"}},
    {OP_SAMPLES, "sample_gradients", "the gradient of every sample", {"bkn", "bkm"}, {"bmn", "bm"}},
    {OP_NORMS, "sample_norms", "the norm of every sample's gradient", {"bkn", "bkm"}, {"b"}},
    {OP_WEIGHTED_SUM, "weighted_sum", "the sum of weighted gradients", {"bkn", "bkm", "wb"}, {"mn", "m"}},
    {OP_FACTORS, "kfac_factors", "A'A and G'G", {"bkn", "bkm"}, {"nn", "mm"}},
};

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
