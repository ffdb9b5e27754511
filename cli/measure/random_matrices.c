/* Random inputs. A random orthogonal matrix is made of products: Hartley transforms C (symmetric, orthogonal, dense for
 * every n) with random signs between them, Q = C S1 C S2 C. That costs two matrix products where Householder vectors
 * would cost a memory-bound sweep of n^3, and it needs none of the decompositions that are to be measured. */
#include "random_matrices.h"

#include <math.h>

/* pi is not in ISO C's math.h. */
static const double pi = 3.14159265358979323846;

/* SplitMix64: 64 good bits from a counter. */
static uint64_t next_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static double next_uniform(uint64_t *state)
{
    double unit = (double)(next_bits(state) >> 11) * 0x1p-53;
    return 1.7320508075688772 * (2.0 * unit - 1.0);
}

/* A stream of its own for each matrix of a batch. */
static uint64_t matrix_stream(uint64_t seed, int64_t index)
{
    uint64_t state = seed ^ ((uint64_t)index << 40);
    return next_bits(&state);
}

static double *host_values(tch_tensor *t)
{
    return t->data; /* made here: contiguous float64 on the host, without an offset */
}

tch_status random_entries(const workplace *place, uint64_t seed, tch_tensor *out)
{
    tch_tensor *host = NULL;
    CLI_TRY(tch_tensor_create_uninitialized(place->host, TCH_FLOAT64, out->ndim, out->shape, TCH_CONTIGUOUS, &host));
    uint64_t state = matrix_stream(seed, 0);
    int64_t count = tch_tensor_numel(host);
    for (int64_t i = 0; i < count; i++) {
        host_values(host)[i] = next_uniform(&state);
    }
    tch_status status = tch_tensor_copy(place->device, out, host);
    if (status == TCH_OK) {
        status = tch_context_synchronize(place->device);
    }
    tch_tensor_destroy(host);
    return status;
}

/* Scratch of random_symmetric: n by n matrices on the host. */
typedef struct builder {
    int64_t n;
    tch_tensor *hartley;
    tch_tensor *left;
    tch_tensor *q;
    tch_tensor *signs; /* n of them */
} builder;

/* C(j, k) = (cos + sin)(2 pi j k / n) / sqrt(n), from a table of the n values that occur. */
static void fill_hartley(int64_t n, double *table, double *out)
{
    for (int64_t i = 0; i < n; i++) {
        double angle = 2.0 * pi * (double)i / (double)n;
        table[i] = (cos(angle) + sin(angle)) / sqrt((double)n);
    }
    for (int64_t j = 0; j < n; j++) {
        for (int64_t k = 0, index = 0; k < n; k++, index = (index + j) % n) {
            out[j * n + k] = table[index];
        }
    }
}

static void copy_scaled(int64_t n, const double *x, const double *columns, double *out)
{
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < n; j++) {
            out[i * n + j] = x[i * n + j] * columns[j];
        }
    }
}

/* Makes equal to the last bit what products leave equal up to rounding. */
static void symmetrize(int64_t n, double *a)
{
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < i; j++) {
            a[i * n + j] = a[j * n + i] = 0.5 * (a[i * n + j] + a[j * n + i]);
        }
    }
}

static void builder_release(builder *b)
{
    tch_tensor_destroy(b->hartley);
    tch_tensor_destroy(b->left);
    tch_tensor_destroy(b->q);
    tch_tensor_destroy(b->signs);
}

static tch_status builder_start(tch_context *host, int64_t n, builder *b)
{
    const int64_t shape[] = {n, n};
    tch_tensor **tensors[] = {&b->hartley, &b->left, &b->q};
    *b = (builder){.n = n};
    CLI_TRY(workplace_vector(host, TCH_FLOAT64, n, &b->signs));
    for (int i = 0; i < 3; i++) {
        CLI_TRY(tch_tensor_create_uninitialized(host, TCH_FLOAT64, 2, shape, TCH_CONTIGUOUS, tensors[i]));
    }
    fill_hartley(n, host_values(b->signs), host_values(b->hartley));
    return TCH_OK;
}

/* q = (x with the signs of its columns drawn) C */
static tch_status mix_signs(tch_context *host, builder *b, uint64_t *state, const tch_tensor *x)
{
    for (int64_t i = 0; i < b->n; i++) {
        host_values(b->signs)[i] = next_bits(state) >> 63 ? 1.0 : -1.0;
    }
    copy_scaled(b->n, x->data, host_values(b->signs), host_values(b->left));
    return tch_matmul(host, b->left, b->hartley, b->q);
}

/* One matrix, left in *a: Q diag(w) Q'. */
static tch_status build_matrix(tch_context *host, builder *b, uint64_t state, const double *eigenvalues, tch_tensor *a)
{
    CLI_TRY(mix_signs(host, b, &state, b->hartley));
    CLI_TRY(mix_signs(host, b, &state, b->q));
    copy_scaled(b->n, host_values(b->q), eigenvalues, host_values(b->left));
    tch_status status = tch_gemm(host, 1.0, b->left, 0, b->q, 1, 0.0, a);
    symmetrize(b->n, host_values(a));
    return status;
}

tch_status random_symmetric(const workplace *place, uint64_t seed, const double *eigenvalues, tch_tensor *out)
{
    int64_t n = out->shape[2];
    builder b;
    tch_tensor *a = NULL;
    tch_status status = builder_start(place->host, n, &b);
    if (status == TCH_OK) {
        status = tch_tensor_create_uninitialized(place->host, TCH_FLOAT64, 2, out->shape + 1, TCH_CONTIGUOUS, &a);
    }
    for (int64_t i = 0; i < out->shape[0] && status == TCH_OK; i++) {
        tch_tensor slice = workplace_slice(out, i);
        status = build_matrix(place->host, &b, matrix_stream(seed, i), eigenvalues, a);
        if (status == TCH_OK) {
            status = tch_tensor_copy(place->device, &slice, a);
        }
        if (status == TCH_OK) {
            status = tch_context_synchronize(place->device);
        }
    }
    tch_tensor_destroy(a);
    builder_release(&b);
    return status;
}

void random_power_law(int64_t n, double condition, double *eigenvalues)
{
    double power = n > 1 ? log(condition) / log((double)n) : 0.0;
    for (int64_t i = 0; i < n; i++) {
        eigenvalues[i] = pow((double)(i + 1), -power);
    }
}
