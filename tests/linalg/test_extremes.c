/* Matrices at every magnitude of their type, from its smallest to its largest, and empty matrices.
 *
 * A matrix function of 2^k A is that of A times a power of two, so the reference is that of the stored numbers scaled
 * near 1, which is exact, and the result is scaled back. Errors are relative to the result's norm: rounding (n + 10
 * units of roundoff, magnified by the condition of the matrix), or a root's tolerance. The error of a subnormal number
 * is up to half of the smallest one, t; relative to a matrix of size 2^k that is t / 2^k, and so is damping. */
#include <float.h>

#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

#define N 5
#define SIZE (N * N)
#define BATCH 2

static const tch_dtype dtypes[] = {{TCH_FLOAT, 64, 1}, {TCH_FLOAT, 32, 1}, {TCH_FLOAT, 16, 1}, {TCH_BFLOAT, 16, 1}};
#define DTYPES 4

/* Exponents of the largest entry, ascending; the last leaves room for eigenvalues of twice that. */
static const int exponents[DTYPES][20] = {
    {-1056, -1032, -1008, -960, -768, -552, -528, -504, -480, -240, 0, 240, 480, 504, 528, 552, 768, 960, 1008, 1020},
    {-144, -132, -120, -96, -72, -48, -24, 0, 24, 48, 72, 96, 120, 124},
    {-12, 0, 12},
    {-120, -96, -48, 0, 48, 96, 120, 124},
};
static const int counts[DTYPES] = {20, 14, 3, 8};

/* --- a batch of matrices near 2^k -------------------------------------------------------------------------------- */

typedef struct trial {
    tch_context *context;
    tch_dtype dtype;
    int k;
    test_tensor *a, *out, *report;
    double near[BATCH][SIZE]; /* the stored numbers over 2^k */
    double w[BATCH][N], v[BATCH][SIZE];
} trial;

/* Eigenvalues from 1/4 to 1, before the largest entry is scaled to [1, 2) 2^k. */
static void fill(test_random *random, double *a)
{
    double spectrum[N];
    ref_spectrum(N, 4.0, spectrum);
    ref_symmetric(random, N, spectrum, a);
    int exponent = ilogb(ref_largest(SIZE, a));
    for (int i = 0; i < SIZE; i++) {
        a[i] = ldexp(a[i], -exponent);
    }
}

static void make_trial(trial *t, tch_context *context, tch_dtype dtype, int k)
{
    const int64_t shape[] = {BATCH, N, N};
    double values[BATCH * SIZE];
    test_random random = test_random_stream((uint64_t)(k + 5000) * 8 + dtype.bits);
    *t = (trial){.context = context, .dtype = dtype, .k = k};
    for (int b = 0; b < BATCH; b++) {
        fill(&random, values + b * SIZE);
    }
    for (int i = 0; i < BATCH * SIZE; i++) {
        values[i] = test_round(dtype, ldexp(values[i], k));
    }
    t->a = test_tensor_make(context, dtype, 3, shape, LAYOUT_CONTIGUOUS);
    t->out = test_tensor_make(context, dtype, 3, shape, LAYOUT_CONTIGUOUS);
    t->report = test_tensor_make(context, TCH_INT32, 1, shape, LAYOUT_CONTIGUOUS);
    test_tensor_write(t->a, values);
    for (int b = 0; b < BATCH; b++) {
        for (int i = 0; i < SIZE; i++) {
            t->near[b][i] = ldexp(values[b * SIZE + i], -k);
        }
        ref_eigh(N, t->near[b], t->w[b], t->v[b]);
    }
}

/* Half of the smallest number of the type and of the compute type, relative to numbers of size 2^k. */
static double granularity(tch_dtype dtype, int k)
{
    return ldexp(test_underflow(dtype), -k) + (dtype.bits == 64 ? 0.0 : ldexp(0x1p-150, -k));
}

/* Largest exponent of the type. */
static int most_exponent(tch_dtype dtype)
{
    return dtype.bits == 64 ? 1023 : dtype.bits == 16 && dtype.code == TCH_FLOAT ? 15 : 127;
}

/* out should be 2^exponent factor (A + damping |A| I)^power for the A near 1, up to `relative` of its norm. */
static void check_result(const trial *t, double factor, double damping, double power, int exponent, double relative)
{
    double *got = test_tensor_read(t->out);
    for (int b = 0; b < BATCH; b++) {
        double *expected = ref_power(N, t->w[b], t->v[b], damping * t->w[b][N - 1], power);
        double *scaled = got + b * SIZE;
        for (int i = 0; i < SIZE; i++) {
            scaled[i] = ldexp(scaled[i], -exponent) / factor;
        }
        double norm = ref_norm(SIZE, expected);
        double error = ref_distance(SIZE, scaled, expected) / norm;
        double bound =
            relative + test_storage_roundoff(t->dtype) + N * granularity(t->dtype, exponent) / (fabs(factor) * norm);
        CHECK(error <= bound, "matrix %d is off by %.3g > %.3g", b, error, bound);
    }
}

/* --- eigenvalues and powers -------------------------------------------------------------------------------------- */

static void check_eigh(trial *t)
{
    const int64_t shape[] = {BATCH, N};
    test_case("eigh, %s, 2^%d", tch_dtype_name(t->dtype), t->k);
    test_tensor *w = test_tensor_make(t->context, t->dtype, 2, shape, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_eigh(t->context, &t->a->tensor, &w->tensor, &t->out->tensor, NULL));
    double *values = test_tensor_read(w);
    double *vectors = test_tensor_read(t->out);
    double bound = (N + 10) * test_arithmetic_roundoff(t->dtype) * 4.0 + 4.0 * test_storage_roundoff(t->dtype) +
                   granularity(t->dtype, t->k);
    for (int b = 0; b < BATCH; b++) {
        double f[N];
        for (int i = 0; i < N; i++) {
            f[i] = ldexp(values[b * N + i], -t->k);
            CHECK(fabs(f[i] - t->w[b][i]) <= bound, "eigenvalue %d is %.17g, expected %.17g", i, f[i], t->w[b][i]);
        }
        double composed[SIZE];
        ref_compose(N, vectors + b * SIZE, f, composed);
        double error = ref_distance(SIZE, composed, t->near[b]);
        CHECK(error <= N * bound + 8.0 * test_storage_roundoff(t->dtype), "V W V' is off by %.3g", error);
    }
}

/* The spectrum is within a factor of 4, up to rounding: f magnifies relative errors of A by no more than 4 |power|
 * 4^|power|. */
static void check_power(trial *t)
{
    static const double powers[] = {-1.0, -0.5, -0.25, 0.25, 0.5, 1.0};
    for (int p = 0; p < 6; p++) {
        int exponent = (int)(t->k * powers[p]);
        bool fits = exponent + 3 <= most_exponent(t->dtype) && exponent >= -most_exponent(t->dtype);
        test_case("power %g, %s, 2^%d", powers[p], tch_dtype_name(t->dtype), t->k);
        if (!fits || t->k % 4 != 0) {
            continue;
        }
        CHECK_OK(tch_matrix_power(t->context, &t->a->tensor, powers[p], 0.0, &t->out->tensor, NULL));
        double rounding = (N + 10) * test_arithmetic_roundoff(t->dtype) + granularity(t->dtype, t->k);
        check_result(t, 1.0, 0.0, powers[p], exponent, 64.0 * rounding);
    }
}

/* --- inverse roots ----------------------------------------------------------------------------------------------- */

static void check_root(trial *t, int32_t root, tch_root_method method, double damping)
{
    int exponent = -t->k / root;
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.method = method;
    config.relative_eps = damping;
    test_case("root %d by %s, %s, 2^%d", root, tch_root_method_name(method), tch_dtype_name(t->dtype), t->k);
    if (t->k % root != 0 || exponent + 3 > most_exponent(t->dtype) || exponent < -most_exponent(t->dtype)) {
        return;
    }
    const int64_t shape[] = {BATCH};
    test_tensor *residual = test_tensor_make(t->context, TCH_FLOAT64, 1, shape, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_inverse_root(t->context, &t->a->tensor, root, &config, &t->out->tensor, &residual->tensor, NULL));
    double tolerance = t->dtype.bits == 64 ? 1e-9 : 1e-3;
    double added = 4.0 * granularity(t->dtype, t->k) / damping; /* of the damping and of eigenvalues */
    check_result(t, 1.0, damping, -1.0 / root, exponent, tolerance + added);
}

static void check_roots(trial *t)
{
    static const int32_t roots[] = {1, 2, 3, 4, 8};
    for (int method = TCH_ROOT_AUTO; method <= TCH_ROOT_RATIONAL; method++) {
        for (int i = 0; i < 5 && test_offers_method((tch_root_method)method); i++) {
            check_root(t, roots[i], (tch_root_method)method, 0.125);
        }
    }
}

/* --- gradients --------------------------------------------------------------------------------------------------- */

/* With grad = I the gradient is f'(A). */
static void check_gradient(trial *t)
{
    const double power = -0.25;
    int exponent = (int)(t->k * (power - 1.0));
    test_case("gradient, %s, 2^%d", tch_dtype_name(t->dtype), t->k);
    if (t->k % 4 != 0 || abs(exponent) + 3 > most_exponent(t->dtype)) {
        return;
    }
    test_tensor *grad = test_tensor_make(t->context, t->dtype, 3, t->a->shape, LAYOUT_CONTIGUOUS);
    double identity[BATCH * SIZE];
    for (int i = 0; i < BATCH * SIZE; i++) {
        identity[i] = i % SIZE % (N + 1) == 0;
    }
    test_tensor_write(grad, identity);
    CHECK_OK(tch_matrix_power_backward(t->context, &t->a->tensor, power, 0.0, &grad->tensor, &t->out->tensor, NULL));
    double rounding = (N + 10) * test_unit_roundoff(t->dtype) + granularity(t->dtype, t->k);
    check_result(t, power, 0.0, power - 1.0, exponent, 64.0 * rounding);
}

/* --- Kronecker products ------------------------------------------------------------------------------------------ */

/* (2^k A)^-1 X (2^-k B)^-1 = A^-1 X B^-1, here with B = 4^-k A and X = A: 4^k 2^-k A^-1, which is 2^k A^-1. */
static void check_solve(trial *t)
{
    test_case("solve, %s, 2^%d", tch_dtype_name(t->dtype), t->k);
    if (abs(t->k) + 3 > most_exponent(t->dtype) || t->k < -most_exponent(t->dtype)) {
        return;
    }
    test_tensor *b = test_tensor_make(t->context, t->dtype, 3, t->a->shape, LAYOUT_CONTIGUOUS);
    double *values = test_tensor_read(t->a);
    for (int i = 0; i < BATCH * SIZE; i++) {
        values[i] = test_round(t->dtype, ldexp(values[i], -2 * t->k));
    }
    test_tensor_write(b, values);
    CHECK_OK(tch_kronecker_solve(t->context, &t->a->tensor, &b->tensor, &t->a->tensor, 0.0, &t->out->tensor, NULL));
    double lost = 64.0 * (granularity(t->dtype, t->k) + granularity(t->dtype, -t->k));
    check_result(t, 1.0, 0.0, -1.0, t->k, 64.0 * (N + 10) * test_arithmetic_roundoff(t->dtype) + lost);
}

/* The nearest product of A (x) [1, 1/2] is itself. */
static void check_nearest(trial *t)
{
    const int64_t shapes[][3] = {{BATCH, N, 2 * N}, {BATCH, N, N}, {BATCH, 1, 2}};
    test_case("nearest product, %s, 2^%d", tch_dtype_name(t->dtype), t->k);
    test_tensor *m = test_tensor_make(t->context, t->dtype, 3, shapes[0], LAYOUT_CONTIGUOUS);
    test_tensor *b = test_tensor_make(t->context, t->dtype, 3, shapes[2], LAYOUT_CONTIGUOUS);
    double *values = test_tensor_read(t->a);
    double whole[2 * BATCH * SIZE];
    for (int i = 0; i < 2 * BATCH * SIZE; i++) {
        whole[i] = test_round(t->dtype, values[i / 2] * (i % 2 == 0 ? 1.0 : 0.5));
    }
    test_tensor_write(m, whole);
    CHECK_OK(tch_nearest_kronecker(t->context, &m->tensor, &t->out->tensor, &b->tensor, NULL));
    double *left = test_tensor_read(t->out);
    double *right = test_tensor_read(b);
    double bound = 64.0 * (N + 10) * 0x1p-53 + 4.0 * test_unit_roundoff(t->dtype) + 4.0 * granularity(t->dtype, t->k);
    for (int i = 0; i < 2 * BATCH * SIZE; i++) {
        int pair = i / (2 * SIZE);
        double product = ldexp(left[i / 2], -t->k / 2) * ldexp(right[2 * pair + i % 2], -t->k / 2);
        CHECK(fabs(product - ldexp(whole[i], -t->k)) <= N * bound, "element %d of the product is %.17g 2^%d", i,
              product, t->k);
    }
}

TEST(every_size_of_number)
{
    static void (*const checks[])(trial * t) = {check_eigh,     check_power, check_roots,
                                                check_gradient, check_solve, check_nearest};
    for (size_t c = 0; c < TEST_COUNT(checks); c++) {
        for (int d = 0; d < DTYPES; d++) {
            for (int i = 0; i < counts[d]; i++) {
                trial t;
                make_trial(&t, *state, dtypes[d], exponents[d][i]);
                checks[c](&t);
            }
        }
    }
}

/* --- results that overflow --------------------------------------------------------------------------------------- */

typedef enum function { POWER, SQUARE, GRADIENT, INVERSE, NAMED_INVERSE, SOLVE } function;

typedef struct overflowing {
    const char *name;
    tch_dtype dtype;
    double entry; /* of the first of two matrices, entry times I, the other being I */
    function function;
} overflowing;

static tch_status call_function(tch_context *context, function f, const tch_tensor *a, tch_tensor *out,
                                tch_tensor *report)
{
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.method = test_on_cpu() ? TCH_ROOT_RATIONAL : TCH_ROOT_NEWTON;
    config.relative_eps = 1e-2;
    switch (f) {
    case POWER:
    case SQUARE:
        return tch_matrix_power(context, a, f == POWER ? -20.0 : 2.0, 0.0, out, report);
    case GRADIENT:
        return tch_matrix_power_backward(context, a, -20.0, 0.0, a, out, report);
    case SOLVE:
        return tch_kronecker_solve(context, a, a, a, 0.0, out, report);
    default:
        return tch_inverse_root(context, a, 1, f == INVERSE ? NULL : &config, out, NULL, report);
    }
}

static void check_overflow(tch_context *context, const overflowing *c)
{
    const int64_t shape[] = {2, 3, 3};
    double values[18] = {0};
    test_case("%s of %g I, %s", c->name, c->entry, tch_dtype_name(c->dtype));
    for (int i = 0; i < 18; i++) {
        values[i] = i % 9 % 4 != 0 ? 0.0 : i < 9 ? c->entry : 1.0;
    }
    test_tensor *a = test_tensor_make(context, c->dtype, 3, shape, LAYOUT_CONTIGUOUS);
    test_tensor *out = test_tensor_make(context, c->dtype, 3, shape, LAYOUT_CONTIGUOUS);
    test_tensor *report = test_tensor_make(context, TCH_INT32, 1, shape, LAYOUT_CONTIGUOUS);
    test_tensor_write(a, values);
    CHECK_OK(call_function(context, c->function, &a->tensor, &out->tensor, &report->tensor));
    double *codes = test_tensor_read(report);
    double *got = test_tensor_read(out);
    CHECK(codes[0] == TCH_REPORT_OVERFLOW && codes[1] == TCH_REPORT_OK, "reported as %g and %g", codes[0], codes[1]);
    for (int i = 0; i < 18; i++) {
        CHECK(isnan(got[i]) == (i < 9), "element %d is %g", i, got[i]);
    }
    tch_status status = call_function(context, c->function, &a->tensor, &out->tensor, NULL);
    CHECK(status == TCH_ERR_NUMERIC && strstr(tch_last_error(), "matrix 0 of a") != NULL &&
              strstr(tch_last_error(), "too large for its type") != NULL,
          "without a report it gave %s: %s", tch_status_name(status), tch_last_error());
}

TEST(results_too_large)
{
    static const overflowing cases[] = {
        {"power", {TCH_FLOAT, 32, 1}, 1e-4, POWER},       {"power", {TCH_FLOAT, 64, 1}, 1e-16, POWER},
        {"power", {TCH_FLOAT, 16, 1}, 0.25, POWER},       {"power", {TCH_BFLOAT, 16, 1}, 1e-4, POWER},
        {"square", {TCH_FLOAT, 32, 1}, 1e20, SQUARE},     {"square", {TCH_FLOAT, 64, 1}, 1e155, SQUARE},
        {"square", {TCH_FLOAT, 16, 1}, 300.0, SQUARE},    {"gradient", {TCH_FLOAT, 64, 1}, 1e-16, GRADIENT},
        {"inverse", {TCH_FLOAT, 16, 1}, 1e-5, INVERSE},   {"inverse", {TCH_FLOAT, 32, 1}, 1e-40, INVERSE},
        {"inverse", {TCH_FLOAT, 64, 1}, 1e-310, INVERSE}, {"inverse, named", {TCH_FLOAT, 16, 1}, 1e-5, NAMED_INVERSE},
        {"solve", {TCH_FLOAT, 32, 1}, 1e-40, SOLVE},      {"solve", {TCH_FLOAT, 16, 1}, 1e-5, SOLVE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check_overflow(*state, &cases[i]);
    }
}

/* All entries of n by n matrices are equal: an eigenvalue n times as large, which overflows the type. */
TEST(eigenvalues_too_large)
{
    tch_context *context = *state;
    const double entries[DTYPES] = {1e308, 2e38, 4e4, 2e38};
    for (int d = 0; d < DTYPES; d++) {
        const int64_t shape[] = {3, 3};
        double values[9];
        test_case("%s", tch_dtype_name(dtypes[d]));
        for (int i = 0; i < 9; i++) {
            values[i] = entries[d];
        }
        test_tensor *a = test_tensor_make(context, dtypes[d], 2, shape, LAYOUT_CONTIGUOUS);
        test_tensor *w = test_tensor_make(context, dtypes[d], 1, shape, LAYOUT_CONTIGUOUS);
        test_tensor *v = test_tensor_make(context, dtypes[d], 2, shape, LAYOUT_CONTIGUOUS);
        test_tensor_write(a, values);
        tch_status status = tch_eigh(context, &a->tensor, &w->tensor, &v->tensor, NULL);
        CHECK(status == TCH_ERR_NUMERIC && strstr(tch_last_error(), "too large") != NULL, "eigh gave %s: %s",
              tch_status_name(status), tch_last_error());
        double *values_left = test_tensor_read(w);
        double *vectors_left = test_tensor_read(v);
        for (int i = 0; i < 9; i++) {
            CHECK(isnan(values_left[i % 3]) && isnan(vectors_left[i]), "results were written");
        }
    }
}

/* --- empty matrices ---------------------------------------------------------------------------------------------- */

typedef struct nothing {
    tch_context *context;
    test_tensor *a, *w, *out, *report, *residual;
    int64_t batch;
} nothing;

static void check_reports(const nothing *e, const char *name)
{
    double *codes = test_tensor_read(e->report);
    for (int64_t b = 0; b < e->batch; b++) {
        CHECK(codes[b] == TCH_REPORT_OK, "%s reports %g", name, codes[b]);
    }
}

static void check_empty_roots(const nothing *e)
{
    for (int i = 0; i < 24; i++) {
        static const int32_t roots[] = {1, 4};
        tch_root_config config = TCH_ROOT_CONFIG_INIT;
        config.method = (tch_root_method)(i % 4);
        config.relative_eps = i / 4 % 3 == 1 ? 1e-3 : 0.0;
        config.eps = i / 4 % 3 == 2 ? 1e-3 : 0.0;
        if (!test_offers_method(config.method)) {
            continue;
        }
        test_case("%s, damping %d, root %d", tch_root_method_name(config.method), i / 4 % 3, (int)roots[i / 12]);
        CHECK_OK(tch_inverse_root(e->context, &e->a->tensor, roots[i / 12], &config, &e->out->tensor, NULL, NULL));
        CHECK_OK(tch_inverse_root(e->context, &e->a->tensor, roots[i / 12], &config, &e->out->tensor,
                                  &e->residual->tensor, &e->report->tensor));
        check_reports(e, "inverse_root");
        CHECK_OK(tch_inverse_root_backward(e->context, &e->a->tensor, roots[i / 12], &config, &e->a->tensor,
                                           &e->out->tensor, NULL));
    }
}

/* Functions with a report; tests/core/test_bad_input.c calls all others with empty tensors. */
static void check_empty_reports(const nothing *e)
{
    test_case("others, a batch of %d", (int)e->batch);
    CHECK_OK(tch_eigh(e->context, &e->a->tensor, &e->w->tensor, NULL, &e->report->tensor));
    check_reports(e, "eigh");
    CHECK_OK(tch_matrix_power(e->context, &e->a->tensor, -0.5, 1e-3, &e->out->tensor, &e->report->tensor));
    check_reports(e, "matrix_power");
    CHECK_OK(tch_matrix_power_backward(e->context, &e->a->tensor, -0.5, 0.0, &e->a->tensor, &e->out->tensor, NULL));
    CHECK_OK(tch_kronecker_solve(e->context, &e->a->tensor, &e->a->tensor, &e->a->tensor, 0.0, &e->out->tensor,
                                 &e->report->tensor));
    check_reports(e, "kronecker_solve");
}

/* Matrices without rows, alone, in a batch, and batches without matrices. */
TEST(nothing_at_all)
{
    static const int64_t shapes[][3] = {{3, 0, 0}, {0, 4, 4}, {0, 0, 0}, {1, 0, 0}};
    for (int i = 0; i < 4 * DTYPES; i++) {
        const int64_t *shape = shapes[i % 4];
        tch_dtype dtype = dtypes[i / 4];
        nothing e = {.context = *state, .batch = shape[0]};
        e.a = test_tensor_make(e.context, dtype, 3, shape, LAYOUT_CONTIGUOUS);
        e.out = test_tensor_make(e.context, dtype, 3, shape, LAYOUT_CONTIGUOUS);
        e.w = test_tensor_make(e.context, dtype, 2, shape, LAYOUT_CONTIGUOUS);
        e.report = test_tensor_make(e.context, TCH_INT32, 1, shape, LAYOUT_CONTIGUOUS);
        e.residual = test_tensor_make(e.context, TCH_FLOAT64, 1, shape, LAYOUT_CONTIGUOUS);
        check_empty_roots(&e);
        check_empty_reports(&e);
    }
}

TEST_MAIN(test_open_context, test_close_context)
