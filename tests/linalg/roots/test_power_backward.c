/* Gradients of powers and inverse roots vs the formula with the reference's eigenvectors, and its special cases: equal,
 * clamped and vanishing eigenvalues.
 *
 * All arithmetic is float64. An eigensolver is exact for A + E with |E| <= (n + 10) u |A|, which moves K by at most
 * max|f''| |E|, and the products around it round by (n + 10) u; with r the rounding of the stored result
 *
 *     |out - reference|  <=  4 (n + 10) u (|A| max|f''| + max|f'|) |G|  +  r |out|
 *
 * in Frobenius norms. */
#include <float.h>

#include "support/elements.h"
#include "support/linalg/cases.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/testing.h"

/* A power with absolute damping, or an inverse root with both kinds. */
typedef struct function {
    double power, eps;
    int32_t root; /* 0 for a power */
    double relative_eps;
    double condition; /* of its input matrices; negative: every second eigenvalue is */
} function;

static const function functions[] = {
    {.power = -0.25, .eps = 1e-2, .condition = 100.0},
    {.power = -0.5, .eps = 0.1, .condition = 100.0},
    {.power = 0.5, .eps = 0.1, .condition = 30.0},
    {.power = -1.0, .eps = 0.1, .condition = -10.0},
    {.power = 1.0, .eps = 0.0, .condition = 10.0},
    {.power = 2.5, .eps = 0.05, .condition = -10.0},
    {.power = 0.0, .eps = 0.1, .condition = 10.0},
    {.root = 4, .relative_eps = 0.05, .condition = 100.0},
    {.root = 2, .eps = 0.2, .condition = 100.0},
    {.root = 3, .eps = 1e-3, .relative_eps = 0.1, .condition = 30.0},
    {.root = 1, .eps = 0.5, .relative_eps = 0.1, .condition = 30.0},
};
#define FUNCTIONS (sizeof functions / sizeof functions[0])

static tch_root_config config_of(const function *f)
{
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.eps = f->eps;
    config.relative_eps = f->relative_eps;
    config.method = TCH_ROOT_EIGEN;
    return config;
}

static tch_status run_backward(tch_context *context, const function *f, const tch_tensor *a, const tch_tensor *grad,
                               tch_tensor *out, tch_tensor *report)
{
    tch_root_config config = config_of(f);
    return f->root == 0 ? tch_matrix_power_backward(context, a, f->power, f->eps, grad, out, report)
                        : tch_inverse_root_backward(context, a, f->root, &config, grad, out, report);
}

/* --- the reference ----------------------------------------------------------------------------------------------- */

static double damping_of(const function *f, double largest)
{
    return fmax(f->eps, f->relative_eps * largest);
}

/* f(w), its first or second derivative; flat below zero for a power, which clamps there. */
static long double value(const function *f, double damping, double w, int derivative)
{
    long double p = f->root == 0 ? (long double)f->power : -1.0L / f->root;
    int clamped = f->root == 0 && w < 0.0;
    long double x = clamped ? (long double)damping : (long double)w + damping;
    switch (derivative) {
    case 0:
        return powl(x, p);
    case 1:
        return clamped ? 0.0L : p * powl(x, p - 1.0L);
    default:
        return clamped ? 0.0L : p * (p - 1.0L) * powl(x, p - 2.0L);
    }
}

static double steepest(const function *f, const known_matrix *known, int derivative)
{
    double damping = damping_of(f, known->w[known->n - 1]);
    double most = 0.0;
    for (int64_t i = 0; i < known->n; i++) {
        most = fmax(most, fabs((double)value(f, damping, known->w[i], derivative)));
    }
    return most;
}

/* V' G V, or back with the transposed V. */
static void rotate(int64_t n, const double *v, int back, const double *g, double *out)
{
    double *transposed = test_alloc((size_t)(n * n) * sizeof *transposed);
    double *product = test_alloc((size_t)(n * n) * sizeof *product);
    ref_transpose(n, n, v, transposed);
    ref_matmul(n, n, n, back ? v : transposed, g, product);
    ref_matmul(n, n, n, product, back ? transposed : v, out);
}

static void ref_backward(const function *f, const known_matrix *known, const double *grad, double *out)
{
    int64_t n = known->n;
    const double *w = known->w;
    double damping = damping_of(f, w[n - 1]);
    double *m = test_alloc((size_t)(n * n) * sizeof *m);
    double through = 0.0;
    for (int64_t i = 0; i < n * n; i++) {
        out[i] = 0.5 * (grad[i] + grad[i % n * n + i / n]);
    }
    rotate(n, known->v, 0, out, m);
    for (int64_t i = 0; i < n * n; i++) {
        int64_t row = i / n;
        int64_t col = i % n;
        m[i] *= row == col ? (double)value(f, damping, w[row], 1)
                           : (double)((value(f, damping, w[row], 0) - value(f, damping, w[col], 0)) /
                                      ((long double)w[row] - w[col]));
        through += row == col ? m[i] : 0.0;
    }
    m[n * n - 1] += f->relative_eps * w[n - 1] > f->eps ? f->relative_eps * through : 0.0;
    rotate(n, known->v, 1, m, out);
}

/* --- over the cases ---------------------------------------------------------------------------------------------- */

static void check_gradient_of(const function *f, const known_matrix *known, const double *grad, const double *got,
                              tch_dtype dtype)
{
    int64_t n = known->n;
    double *expected = test_alloc((size_t)(n * n) * sizeof *expected);
    ref_backward(f, known, grad, expected);
    double error = ref_distance(n * n, got, expected);
    double magnified = ref_norm(n * n, known->a) * steepest(f, known, 2) + steepest(f, known, 1);
    double storage = dtype.bits == 64 ? 0.0 : test_unit_roundoff(dtype) * ref_norm(n * n, expected);
    double bound = 4.0 * (double)(n + 10) * 0.5 * DBL_EPSILON * magnified * ref_norm(n * n, grad) + 1.01 * storage +
                   DBL_MIN + (double)n * test_underflow(dtype);
    CHECK(error <= bound, "power %g, root %d, eps %g, relative %g: off by %.3g > %.3g", f->power, f->root, f->eps,
          f->relative_eps, error, bound);
    for (int64_t i = 0; i < n * n; i++) {
        CHECK(got[i] == got[i % n * n + i / n], "element %lld differs from its mirror image", (long long)i);
    }
}

static void check_gradient(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    const function *f = &functions[((size_t)v->in * 3 + (size_t)v->out + (size_t)v->stream) % FUNCTIONS];
    int64_t size = v->n * v->n;
    test_tensor *a = test_known_tensor(context, v, f->condition, dtype);
    test_tensor *grad = test_case_random(context, v, dtype, v->n, v->n, v->in, 5);
    test_tensor *out = test_case_tensor(context, v, dtype, v->n, v->n, v->out);
    test_tensor *report = test_case_tensor(context, v, TCH_INT32, -1, -1, LAYOUT_CONTIGUOUS);
    CHECK_OK(run_backward(context, f, &a->tensor, &grad->tensor, &out->tensor, &report->tensor));
    test_tensor_check_unchanged(a, "a");
    double *given = test_tensor_read_unchanged(grad, "grad");
    double *got = test_tensor_read_written(out, "out");
    test_check_report_ok(report);
    for (int64_t b = 0; b < v->matrices; b++) {
        check_gradient_of(f, test_known_of(v, b, f->condition, dtype), given + b * size, got + b * size, dtype);
    }
}

TEST(follows_the_formula)
{
    test_for_each_case(*state, "backward", TCH_FLOAT64, 130, check_gradient);
    test_for_each_case(*state, "backward", TCH_FLOAT32, 65, check_gradient);
    test_for_each_case(*state, "backward", TCH_FLOAT16, 33, check_gradient);
    test_for_each_case(*state, "backward", TCH_BFLOAT16, 33, check_gradient);
}

/* --- single matrices of float64 ---------------------------------------------------------------------------------- */

enum { N = 9 };

static const int64_t single[] = {N, N};

static test_tensor *tensor_of(tch_context *context, const double *values)
{
    test_tensor *t = test_tensor_make(context, TCH_FLOAT64, 2, single, LAYOUT_CONTIGUOUS);
    if (values != NULL) {
        test_tensor_write(t, values);
    }
    return t;
}

static void gradient_at(tch_context *context, const function *f, const double *a, const double *grad, double *out)
{
    test_tensor *ta = tensor_of(context, a);
    test_tensor *tgrad = tensor_of(context, grad);
    test_tensor *tout = tensor_of(context, NULL);
    CHECK_OK(run_backward(context, f, &ta->tensor, &tgrad->tensor, &tout->tensor, NULL));
    double *got = test_tensor_read(tout);
    memcpy(out, got, N * N * sizeof *out);
}

static void check_close(const double *got, const double *expected, double tolerance)
{
    double scale = ref_norm(N * N, expected);
    double error = ref_distance(N * N, got, expected);
    CHECK(error <= tolerance * scale, "off by %.3g of %.3g", error, scale);
}

static void symmetric_part(const double *grad, double factor, double *out)
{
    for (int i = 0; i < N * N; i++) {
        out[i] = 0.5 * factor * (grad[i] + grad[i % N * N + i / N]);
    }
}

/* A multiple of the identity, exactly and up to the last few bits, where a difference quotient has no correct digit. */
TEST(equal_eigenvalues)
{
    static const double apart[] = {0.0, 1e-15, 1e-12, 1e-9};
    const function f = {.power = -0.25, .eps = 0.5};
    test_random random = test_random_stream(420);
    double grad[N * N];
    test_random_fill_normal(&random, grad, N * N);
    for (size_t k = 0; k < sizeof apart / sizeof apart[0]; k++) {
        double a[N * N] = {0};
        double out[N * N];
        double expected[N * N];
        test_case("eigenvalues %g apart", apart[k]);
        for (int i = 0; i < N; i++) {
            a[i * N + i] = 2.0 + i * apart[k];
        }
        gradient_at(*state, &f, a, grad, out);
        symmetric_part(grad, (double)value(&f, 0.5, 2.0, 1), expected);
        check_close(out, expected, 1e-14 + 10.0 * N * apart[k]);
    }
}

/* If several eigenvalues are the largest, each contributes to the relative damping, so that the gradient does not
 * depend on the eigensolver's basis of their space. */
TEST(equal_largest_eigenvalues)
{
    const function f = {.root = 2, .relative_eps = 0.25};
    test_random random = test_random_stream(421);
    double grad[N * N];
    double a[N * N] = {0};
    double out[N * N];
    double expected[N * N];
    double trace = 0.0;
    double slope = (double)value(&f, 0.25, 1.0, 1);
    test_random_fill_normal(&random, grad, N * N);
    for (int i = 0; i < N; i++) {
        a[i * N + i] = 1.0;
        trace += grad[i * N + i];
    }
    gradient_at(*state, &f, a, grad, out);
    symmetric_part(grad, slope, expected);
    for (int i = 0; i < N; i++) {
        expected[i * N + i] += 0.25 * slope * trace / N;
    }
    check_close(out, expected, 1e-13);
}

/* Rank one: eight eigenvalues are zero up to rounding, of either sign, and all have the derivative from above. */
TEST(low_rank)
{
    const function f = {.power = -0.5, .eps = 0.125};
    test_random random = test_random_stream(422);
    double x[N];
    double grad[N * N];
    double out[N * N];
    double expected[N * N];
    known_matrix known = {.n = N, .a = test_alloc(N * N * sizeof(double))};
    known.w = test_alloc(N * sizeof *known.w);
    known.v = test_alloc(N * N * sizeof *known.v);
    test_random_fill_normal(&random, x, N);
    test_random_fill_normal(&random, grad, N * N);
    for (int i = 0; i < N * N; i++) {
        known.a[i] = x[i / N] * x[i % N];
    }
    ref_eigh(N, known.a, known.w, known.v);
    for (int i = 0; i < N - 1; i++) {
        known.w[i] = i * 1e-9; /* far enough apart for the reference's quotients */
    }
    gradient_at(*state, &f, known.a, grad, out);
    ref_backward(&f, &known, grad, expected);
    check_close(out, expected, 1e-7);
}

/* Far apart and extreme: no intermediate overflow. */
TEST(wide_spectra)
{
    static const double powers[] = {-2.0, -0.25, 0.5, 3.0};
    for (size_t k = 0; k < sizeof powers / sizeof powers[0]; k++) {
        const function f = {.power = powers[k], .eps = 1e-60};
        double a[N * N] = {0};
        double grad[N * N];
        double out[N * N];
        test_case("power %g of a spectrum from 1e-40 to 1e40", powers[k]);
        for (int i = 0; i < N; i++) {
            a[i * N + i] = pow(10.0, 10.0 * i - 40.0);
        }
        for (int i = 0; i < N * N; i++) {
            grad[i] = 1.0;
        }
        gradient_at(*state, &f, a, grad, out);
        for (int i = 0; i < N * N; i++) {
            double x = a[i / N * (N + 1)];
            double y = a[i % N * (N + 1)];
            double expected = x == y
                                  ? (double)value(&f, f.eps, x, 1)
                                  : (double)((value(&f, f.eps, x, 0) - value(&f, f.eps, y, 0)) / ((long double)x - y));
            CHECK(fabs(out[i] - expected) <= 1e-12 * fabs(expected), "element %d is %.17g, expected %.17g", i, out[i],
                  expected);
        }
    }
}

/* --- bad numbers ------------------------------------------------------------------------------------------------- */

/* Non-finite gradients are not an error and propagate. */
TEST(gradients_that_are_not_finite)
{
    const function f = {.power = -0.5, .eps = 0.1};
    double grad[N * N] = {0};
    double out[N * N];
    grad[N + 2] = NAN;
    gradient_at(*state, &f, test_known(N, 0, 10.0, TCH_FLOAT64)->a, grad, out);
    CHECK(isnan(out[0]), "a NaN in the gradient was lost");
}

TEST(wrong_numbers)
{
    static const struct {
        function f;
        const char *said;
    } wrong[] = {
        {{.power = NAN}, "power is nan"},
        {{.power = 1.0, .eps = -1.0}, "eps is -1"},
        {{.power = 1.0, .eps = INFINITY}, "eps is inf"},
        {{.root = 5}, "root is 5"},
        {{.root = 4, .relative_eps = NAN}, "relative_eps is nan"},
    };
    test_tensor *a = tensor_of(*state, test_known(N, 0, 10.0, TCH_FLOAT64)->a);
    test_tensor *out = tensor_of(*state, NULL);
    for (size_t i = 0; i < TEST_COUNT(wrong); i++) {
        tch_status got = run_backward(*state, &wrong[i].f, &a->tensor, &a->tensor, &out->tensor, NULL);
        CHECK(got == TCH_ERR_INVALID_ARGUMENT && strstr(tch_last_error(), wrong[i].said) != NULL, "gave %s: %s",
              tch_status_name(got), tch_last_error());
    }
    test_tensor_check_unchanged(out, "out");
}

TEST_MAIN(test_open_context, test_close_known)
