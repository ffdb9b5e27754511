/* Eigendecompositions and powers of symmetric matrices, against Jacobi rotations in float64 and by their residuals.
 *
 * A stable eigensolver returns the exact decomposition of A + E with |E| <= c n u |A|; with c n taken as n + 10, u the
 * unit roundoff of the arithmetic and r that of storing the result (nothing more for float32 and float64):
 *     |A V - V W|, |w - w_ref|           <=  (n + 10) u |A|  +  3 r sqrt(n) |A|
 *     |V'V - I|                          <=  (n + 10) u sqrt(n)  +  3 r sqrt(n)
 *     |f(A) - V f(W) V'| for a power f   <=  (n + 10) u (|A| max|f'| + |f(A)|)  +  r |f(A)|  +  n t
 * in Frobenius norms, max|f'| over the damped spectrum being how f magnifies an error of its argument, and t half of
 * the smallest number of the type. */
#include "support/elements.h"
#include "support/linalg/cases.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/testing.h"

#define INDEFINITE (-10.0) /* condition 10, signs alternating */

static void check_orthonormal(int64_t n, const double *v, tch_dtype dtype)
{
    double *transposed = test_alloc((size_t)(n * n) * sizeof *transposed);
    double *gram = test_alloc((size_t)(n * n) * sizeof *gram);
    ref_transpose(n, n, v, transposed);
    ref_matmul(n, n, n, transposed, v, gram);
    for (int64_t i = 0; i < n; i++) {
        gram[i * n + i] -= 1.0;
    }
    double error = ref_norm(n * n, gram);
    double root = sqrt((double)n);
    double bound =
        (double)(n + 10) * test_arithmetic_roundoff(dtype) * root + 3.0 * test_storage_roundoff(dtype) * root;
    CHECK(error <= bound, "|V'V - I| is %.3g > %.3g", error, bound);
}

static void check_residual(int64_t n, const double *a, const double *w, const double *v, tch_dtype dtype)
{
    double *product = test_alloc((size_t)(n * n) * sizeof *product);
    ref_matmul(n, n, n, a, v, product);
    for (int64_t i = 0; i < n * n; i++) {
        product[i] -= v[i] * w[i % n];
    }
    double error = ref_norm(n * n, product);
    double bound =
        ((double)(n + 10) * test_arithmetic_roundoff(dtype) + 3.0 * test_storage_roundoff(dtype) * sqrt((double)n)) *
        ref_norm(n * n, a);
    bound *=
        test_on_cpu() ? 1.0 : 2.0; /* cuSOLVER's of 17 rows over twelve orders of magnitude reaches 1.2 on an H200 */
    CHECK(error <= bound, "|AV - VW| is %.3g > %.3g", error, bound);
}

static void check_eigenvalues(int64_t n, const double *w, const double *expected, double norm, tch_dtype dtype)
{
    double bound = ((double)(n + 10) * test_arithmetic_roundoff(dtype) + test_storage_roundoff(dtype)) * norm;
    for (int64_t i = 0; i < n; i++) {
        CHECK(i == 0 || w[i] >= w[i - 1], "eigenvalues are not ascending: %g after %g", w[i], w[i - 1]);
        CHECK(expected == NULL || fabs(w[i] - expected[i]) <= bound, "eigenvalue %lld is %.17g, expected %.17g",
              (long long)i, w[i], expected[i]);
    }
}

/* With eigenvectors and without. */
static void check_eigh(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    int64_t size = v->n * v->n;
    test_tensor *a = test_known_tensor(context, v, INDEFINITE, dtype);
    test_tensor *w = test_case_tensor(context, v, dtype, v->n, -1, v->out);
    test_tensor *alone = test_case_tensor(context, v, dtype, v->n, -1, LAYOUT_OFFSET);
    test_tensor *vectors = test_case_tensor(context, v, dtype, v->n, v->n, v->out);
    test_tensor *report = test_case_tensor(context, v, TCH_INT32, -1, -1, LAYOUT_STEPPED);
    CHECK_OK(tch_eigh(context, &a->tensor, &w->tensor, &vectors->tensor, &report->tensor));
    CHECK_OK(tch_eigh(context, &a->tensor, &alone->tensor, NULL, NULL));
    test_tensor_check_unchanged(a, "a");
    double *values = test_tensor_read_written(w, "w");
    double *values_alone = test_tensor_read_written(alone, "w");
    double *columns = test_tensor_read_written(vectors, "v");
    test_check_report_ok(report);
    for (int64_t b = 0; b < v->matrices; b++) {
        const known_matrix *known = test_known_of(v, b, INDEFINITE, dtype);
        check_eigenvalues(v->n, values + b * v->n, known->w, ref_norm(size, known->a), dtype);
        check_eigenvalues(v->n, values_alone + b * v->n, known->w, ref_norm(size, known->a), dtype);
        check_orthonormal(v->n, columns + b * size, dtype);
        check_residual(v->n, known->a, values + b * v->n, columns + b * size, dtype);
    }
}

/* --- powers ------------------------------------------------------------------------------------------------------ */

static const struct {
    double power, eps, condition;
} powers[] = {{-0.25, 1e-3, 100.0}, {-0.5, 0.0, 100.0}, {0.5, 0.0, 100.0},      {-1.0, 0.0, 30.0},
              {1.0, 0.0, -10.0},    {2.0, 0.1, 100.0},  {-1.0 / 3, 0.5, -10.0}, {0.0, 0.1, 30.0}};

static double damped(double w, double eps)
{
    return fmax(w + eps, eps);
}

/* max|f'| of f(x) = x^power between the damped ends of the spectrum. */
static double steepness(const known_matrix *known, double power, double eps)
{
    double low = damped(known->w[0], eps);
    double high = damped(known->w[known->n - 1], eps);
    if (power == 0.0 || power == 1.0) {
        return fabs(power);
    }
    return fabs(power) * fmax(pow(low, power - 1.0), pow(high, power - 1.0));
}

static void check_power_of(const known_matrix *known, double power, double eps, const double *got, tch_dtype dtype)
{
    int64_t n = known->n;
    double *f = test_alloc((size_t)n * sizeof *f);
    double *expected = test_alloc((size_t)(n * n) * sizeof *expected);
    for (int64_t i = 0; i < n; i++) {
        f[i] = pow(damped(known->w[i], eps), power);
    }
    ref_compose(n, known->v, f, expected);
    double norm = ref_norm(n, f);
    double error = ref_distance(n * n, got, expected);
    double bound = (double)(n + 10) * test_arithmetic_roundoff(dtype) *
                       (ref_norm(n * n, known->a) * steepness(known, power, eps) + norm) +
                   test_storage_roundoff(dtype) * norm + (double)n * test_underflow(dtype);
    CHECK(error <= bound, "the power %g with eps %g is off by %.3g > %.3g", power, eps, error, bound);
}

/* Half types round away the small end of a spectrum of ratio 100: there the damping is raised. */
static void check_power(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    size_t which = ((size_t)v->in + (size_t)v->out + (size_t)v->stream) % (sizeof powers / sizeof powers[0]);
    double power = powers[which].power;
    double eps = dtype.bits == 16 ? powers[which].eps + 0.1 : powers[which].eps;
    double condition = powers[which].condition;
    test_tensor *a = test_known_tensor(context, v, condition, dtype);
    test_tensor *out = test_case_tensor(context, v, dtype, v->n, v->n, v->out);
    test_tensor *report = test_case_tensor(context, v, TCH_INT32, -1, -1, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_matrix_power(context, &a->tensor, power, eps, &out->tensor, &report->tensor));
    test_tensor_check_unchanged(a, "a");
    double *got = test_tensor_read_written(out, "out");
    test_check_report_ok(report);
    for (int64_t b = 0; b < v->matrices; b++) {
        check_power_of(test_known_of(v, b, condition, dtype), power, eps, got + b * v->n * v->n, dtype);
    }
}

/* --- powers of indefinite matrices ------------------------------------------------------------------------------- */

/* Eigenvalues of the middle matrix of a batch; the others are positive. */
static const double clamped_spectra[][3] = {{-1.0, -1.0, -1.0}, {-3.0, -0.5, -0.125}, {0.0, 0.0, 0.0},
                                            {-2.0, 0.0, 1.5},   {-1.0, 0.0, 0.0},     {-1e-3, -1e-6, -1e-9}};

/* As rounded to the dtype, with eigenvalues by the reference. */
static void fill_clamped(test_random *random, const double *spectrum, tch_dtype dtype, known_matrix *known)
{
    ref_symmetric(random, 3, spectrum, known->a);
    for (int i = 0; i < 9; i++) {
        known->a[i] = test_round(dtype, known->a[i]);
    }
    ref_eigh(3, known->a, known->w, known->v);
}

static void check_clamped(tch_context *context, const double *spectrum, double power, double eps, tch_dtype dtype)
{
    static const double positive[] = {0.25, 0.5, 1.0};
    const int64_t shape[] = {3, 3, 3};
    double a[27];
    double w[9];
    double v[27];
    known_matrix known[3];
    test_random random = test_random_stream(77);
    for (int b = 0; b < 3; b++) {
        known[b] = (known_matrix){3, a + 9 * b, w + 3 * b, v + 9 * b};
        fill_clamped(&random, b == 1 ? spectrum : positive, dtype, &known[b]);
    }
    test_case("%s, power %g, eps %g, eigenvalues %g to %g", tch_dtype_name(dtype), power, eps, spectrum[0],
              spectrum[2]);
    test_tensor *in = test_tensor_make(context, dtype, 3, shape, LAYOUT_CONTIGUOUS);
    test_tensor *out = test_tensor_make(context, dtype, 3, shape, LAYOUT_CONTIGUOUS);
    test_tensor_write(in, a);
    CHECK_OK(tch_matrix_power(context, &in->tensor, power, eps, &out->tensor, NULL));
    double *got = test_tensor_read(out);
    for (int b = 0; b < 3; b++) {
        check_power_of(&known[b], power, eps, got + 9 * b, dtype);
    }
}

/* max(w + eps, eps)^power for any signs: eps^power I for a matrix without a positive eigenvalue. */
TEST(powers_of_clamped_matrices)
{
    static const double powers_with_eps[] = {-1.0, -0.5, -1.0 / 3, 0.0, 0.5, 1.0, 2.0};
    static const double eps[] = {1e-3, 0.25, 2.0};
    const tch_dtype dtypes[] = {TCH_FLOAT32, TCH_FLOAT64, TCH_FLOAT16, TCH_BFLOAT16};
    for (size_t i = 0; i < 6 * 7 * 3 * 4; i++) {
        check_clamped(*state, clamped_spectra[i % 6], powers_with_eps[i / 6 % 7], eps[i / 42 % 3], dtypes[i / 126]);
    }
    for (size_t i = 0; i < 6 * 4; i++) { /* without damping, the positive part */
        check_clamped(*state, clamped_spectra[i % 6], 1.0, 0.0, dtypes[i / 6]);
    }
}

/* --- the tests --------------------------------------------------------------------------------------------------- */

static const test_conformance operations[] = {
    {"eigh", 200, 65, check_eigh},
    {"matrix_power", 200, 65, check_power},
};

TEST(every_layout_and_size)
{
    test_for_each_operation(*state, operations, TEST_COUNT(operations));
}

/* Decompositions of `count` matrices at once, checked by their residuals only. */
static void check_matrices(tch_context *context, const char *name, int64_t count, int64_t n, const double *values,
                           tch_dtype dtype)
{
    const int64_t shape[] = {count, n, n};
    int32_t batch_rank = count > 1;
    const int64_t *sizes = shape + !batch_rank;
    test_case("%s, %lld of n = %lld, %s", name, (long long)count, (long long)n, tch_dtype_name(dtype));
    test_tensor *a = test_tensor_make(context, dtype, batch_rank + 2, sizes, LAYOUT_CONTIGUOUS);
    test_tensor *w = test_tensor_make(context, dtype, batch_rank + 1, sizes, LAYOUT_CONTIGUOUS);
    test_tensor *v = test_tensor_make(context, dtype, batch_rank + 2, sizes, LAYOUT_TRANSPOSED);
    test_tensor_write(a, values);
    CHECK_OK(tch_eigh(context, &a->tensor, &w->tensor, &v->tensor, NULL));
    double *held = test_tensor_read(a);
    double *eigenvalues = test_tensor_read_written(w, "w");
    double *vectors = test_tensor_read_written(v, "v");
    for (int64_t b = 0; b < count; b++) {
        check_eigenvalues(n, eigenvalues + b * n, NULL, 0.0, dtype);
        check_orthonormal(n, vectors + b * n * n, dtype);
        check_residual(n, held + b * n * n, eigenvalues + b * n, vectors + b * n * n, dtype);
    }
}

TEST(large_matrices)
{
    const int64_t n = 650;
    double *spectrum = test_alloc((size_t)n * sizeof *spectrum);
    double *a = test_alloc((size_t)(n * n) * sizeof *a);
    test_random random = test_random_stream(81);
    ref_spectrum(n, 1e4, spectrum);
    ref_symmetric(&random, n, spectrum, a);
    check_matrices(*state, "random", 1, n, a, TCH_FLOAT32);
    check_matrices(*state, "random", 1, n, a, TCH_FLOAT64);
}

/* Matrices that are difficult for eigensolvers: diagonal, all equal, clusters, tridiagonal with tiny couplings, one
 * large entry, rank one, entries near the ends of the range, whose squares overflow or underflow, close pairs of
 * eigenvalues (Wilkinson's matrix of order 21, glued together), the identity and rank one, entries that decrease by
 * thirty orders of magnitude; and the last by their eigenvalues: a cluster, two values, and values that decrease by
 * twelve orders. */
enum { ENTRIES = 15, AWKWARD = ENTRIES + 3 };

static void fill_awkward(int which, int64_t n, double huge, double *a)
{
    test_random random = test_random_stream(500 + (uint64_t)n);
    double *g = test_alloc((size_t)(n * n) * sizeof *g);
    double *w = test_alloc((size_t)n * sizeof *w);
    test_random_fill_normal(&random, g, n * n);
    for (int64_t i = 0; i < n; i++) {
        const double values[] = {1.0 + 1e-9 * g[i], i < n / 2 ? -1.0 : 1.0, pow(10.0, -12.0 * (double)i / (double)n)};
        w[i] = values[which < ENTRIES ? 0 : which - ENTRIES];
    }
    for (int64_t i = 0; i < n * n && which < ENTRIES; i++) {
        int64_t row = i / n;
        int64_t col = i % n;
        double diagonal = row == col;
        double neighbor = row - col == 1 || col - row == 1;
        double apart = (double)(row > col ? row - col : col - row);
        double graded = pow(10.0, -30.0 * (double)(row + col) / (double)(2 * n));
        bool glued = (row > col ? row : col) % 21 == 0;
        const double values[ENTRIES] = {0.0,
                                        diagonal,
                                        diagonal * (double)(row / 8),
                                        diagonal * (double)row + 1e-9 * neighbor,
                                        2.0 * diagonal - neighbor,
                                        1.0,
                                        row == n - 1 && col == n - 1 ? 1.0 : 1e-6,
                                        1.0 / (1.0 + (double)row + (double)col),
                                        diagonal + 1e-12 * (1.0 - diagonal),
                                        huge / (1.0 + apart),
                                        (1.0 + apart) / huge,
                                        diagonal * fabs((double)(row % 21 - 10)) + neighbor * (glued ? 1e-7 : 1.0),
                                        g[row] * g[col] + diagonal,
                                        (g[i] + g[col * n + row]) * graded,
                                        (g[i] + g[col * n + row]) * 1e-30 / graded};
        a[i] = values[which];
    }
    if (which >= ENTRIES) {
        ref_symmetric(&random, n, w, a);
    }
}

/* The largest uses several threads for one matrix. */
TEST(awkward_matrices)
{
    static const int64_t sizes[] = {1, 2, 3, 4, 7, 16, 17, 24, 25, 33, 64, 65, 100, 129, 385};
    for (size_t i = 0; i < AWKWARD * TEST_COUNT(sizes); i++) {
        int64_t n = sizes[i / AWKWARD];
        int which = (int)(i % AWKWARD);
        size_t mark = test_mark();
        double *a = test_alloc((size_t)(n * n) * sizeof *a);
        char name[32];
        snprintf(name, sizeof name, "awkward %d", which);
        fill_awkward(which, n, 1e30, a);
        check_matrices(*state, name, 1, n, a, TCH_FLOAT32);
        fill_awkward(which, n, 1e200, a);
        check_matrices(*state, name, 1, n, a, TCH_FLOAT64);
        test_release_since(mark);
    }
}

/* The sum of x x' over `rank` random vectors x, like an optimizer's factor after one or two steps. All but `rank`
 * eigenvalues are zero up to rounding, and rounding errors determine their eigenvectors. */
static void add_low_rank(test_random *random, int64_t n, int64_t rank, double *a)
{
    double *x = test_alloc((size_t)n * sizeof *x);
    for (int64_t k = 0; k < rank; k++) {
        test_random_fill_normal(random, x, n);
        for (int64_t i = 0; i < n * n; i++) {
            a[i] += x[i / n] * x[i % n];
        }
    }
}

/* Each size alone and in a batch with alternating ranks one and three. */
TEST(low_rank)
{
    static const int64_t sizes[] = {5, 17, 33, 64, 100, 320};
    enum { COUNT = 4 };
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        int64_t n = sizes[s];
        double *a = test_alloc((size_t)(COUNT * n * n) * sizeof *a);
        memset(a, 0, (size_t)(COUNT * n * n) * sizeof *a);
        test_random random = test_random_stream(82 + s);
        for (int64_t b = 0; b < COUNT; b++) {
            add_low_rank(&random, n, b % 2 == 0 ? 1 : 3, a + b * n * n);
        }
        for (int which = 0; which < 2; which++) {
            tch_dtype dtype = which == 0 ? TCH_FLOAT32 : TCH_FLOAT64;
            check_matrices(*state, "rank one", 1, n, a, dtype);
            check_matrices(*state, "rank three", 1, n, a + n * n, dtype);
            check_matrices(*state, "low ranks", COUNT, n, a, dtype);
        }
    }
}

/* One thread and two threads compute the same. */
TEST(thread_counts_agree)
{
    tch_context *context = *state;
    int32_t usual = tch_get_num_threads();
    if (!test_on_cpu()) {
        skip(); /* threads are the CPU's */
    }
    for (int32_t threads = 1; threads <= 3; threads++) {
        CHECK_OK(tch_set_num_threads(threads));
        test_variation v = {.n = 65, .batch_rank = 1, .batch = {4}, .matrices = 4, .stream = 10};
        test_case("%d threads", threads);
        check_eigh(context, &v, TCH_FLOAT32);
        check_power(context, &v, TCH_FLOAT64);
    }
    CHECK_OK(tch_set_num_threads(usual));
}

TEST_MAIN(test_open_context, test_close_known)
