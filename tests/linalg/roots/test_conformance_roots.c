/* Inverse roots by every method vs the float64 eigendecomposition, and their residuals.
 *
 * tch_root_config.tolerance guarantees |X - X_ref| <= tolerance |X_ref| for a result reported as good; storing it adds
 * one rounding. By eigenvalues the error is that of a stable eigensolver, |E| <= (n + 10) u |A|, magnified by the slope
 * of x^(-1/p) at the smallest eigenvalue: relative to |X| at most (n + 10) u kappa / p, plus (n + 10) u for composing
 * the result, with kappa the condition number after damping. If that exceeds the tolerance, the eigen method is not
 * expected to be better. */
#include "support/elements.h"
#include "support/linalg/cases.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/testing.h"

static const int32_t roots[] = {1, 2, 3, 4, 6, 8};
static const tch_root_method methods[] = {TCH_ROOT_AUTO, TCH_ROOT_EIGEN, TCH_ROOT_NEWTON, TCH_ROOT_RATIONAL};

/* The methods by number. On a device without one, the Newton method replaces it, which has the same guarantee. */
static tch_root_method method_at(size_t number)
{
    return test_offers_method(methods[number % 4]) ? methods[number % 4] : TCH_ROOT_NEWTON;
}

/* Spectrum and damping within the range of every method. Rounding A to a half type moves its eigenvalues by about u
 * sqrt(n), so the spectrum there must end well above that. */
static double usual_condition(tch_dtype dtype)
{
    return dtype.bits == 16 ? 10.0 : 1e3;
}

static double promised_tolerance(const tch_root_config *config, tch_dtype dtype)
{
    double tolerance = config->tolerance > 0.0 ? config->tolerance : dtype.bits == 64 ? 1e-9 : 1e-3;
    return tolerance + test_unit_roundoff(dtype);
}

static double damping_of(const known_matrix *known, const tch_root_config *config)
{
    return fmax(config->eps, config->relative_eps * known->w[known->n - 1]);
}

static double condition_of(const known_matrix *known, const tch_root_config *config)
{
    double damping = damping_of(known, config);
    return (known->w[known->n - 1] + damping) / (known->w[0] + damping);
}

static void check_error(const known_matrix *known, int32_t root, const tch_root_config *config, const double *x,
                        tch_dtype dtype)
{
    int64_t n = known->n;
    double *expected = ref_power(n, known->w, known->v, damping_of(known, config), -1.0 / root);
    double error = ref_distance(n * n, x, expected) / ref_norm(n * n, expected);
    double bound = promised_tolerance(config, dtype);
    /* (n + 10) u kappa / p for the method, plus composing the result. */
    double stable = (double)(n + 10) * test_arithmetic_roundoff(dtype) * (condition_of(known, config) / root + 1.0);
    bool may_be_eigen = config->method == TCH_ROOT_EIGEN || config->method == TCH_ROOT_AUTO;
    CHECK(error <= (may_be_eigen ? fmax(bound, stable) : bound), "relative error %.3g > %.3g promised", error, bound);
    if (config->method == TCH_ROOT_EIGEN && dtype.bits != 16) {
        CHECK(error <= stable, "relative error %.3g > %.3g of a stable eigensolver", error, stable);
    }
}

/* A residual in float64 arithmetic of the stored result agrees with the reference's to its own rounding, n u64 kappa
 * for each of the p + 1 products; one estimated with probes agrees within a factor. Storing the result in a narrower
 * type may come after the certificate. An error D of X, |D| <= u |X|, appears as X^i D X^j A X^k with i + j + k = p -
 * 1, in which the balanced order magnifies it by at most kappa^(ceil(p/2) / p), once for each of the p factors. The
 * largest eigenvalue, a part of relative damping, need only be accurate to the tolerance. */
static void check_certificate(const known_matrix *known, int32_t root, const tch_root_config *config, const double *x,
                              double residual, tch_dtype dtype)
{
    double own = ref_root_residual(known->n, root, known->a, damping_of(known, config), x);
    double kappa = condition_of(known, config);
    double storing = root * test_unit_roundoff(dtype) * pow(kappa, (double)((root + 1) / 2) / root);
    double damping = damping_of(known, config);
    double estimated = config->relative_eps * known->w[known->n - 1] > config->eps
                           ? promised_tolerance(config, dtype) * damping / (known->w[0] + damping)
                           : 0.0;
    double rounding = (root + 1) * (double)known->n * 0x1p-53 * kappa + storing + estimated;
    double factor = config->exact_residual ? 1.0 + 1e-6 : 4.0;
    CHECK(residual <= factor * own + rounding && own <= factor * residual + rounding,
          "the residual is given as %.3g and is %.3g", residual, own);
}

typedef struct root_call {
    test_tensor *a, *out, *residual, *report;
} root_call;

static root_call make_call(tch_context *context, const test_variation *v, double condition, tch_dtype dtype)
{
    return (root_call){test_known_tensor(context, v, condition, dtype),
                       test_case_tensor(context, v, dtype, v->n, v->n, v->out),
                       test_case_tensor(context, v, TCH_FLOAT64, -1, -1, LAYOUT_OFFSET),
                       test_case_tensor(context, v, TCH_INT32, -1, -1, LAYOUT_STEPPED)};
}

/* Runs one case and checks that every matrix is good. */
static void check_roots(tch_context *context, const test_variation *v, double condition, tch_dtype dtype, int32_t root,
                        const tch_root_config *config)
{
    int64_t size = v->n * v->n;
    root_call c = make_call(context, v, condition, dtype);
    CHECK_OK(
        tch_inverse_root(context, &c.a->tensor, root, config, &c.out->tensor, &c.residual->tensor, &c.report->tensor));
    test_tensor_check_unchanged(c.a, "a");
    double *x = test_tensor_read(c.out);
    double *residual = test_tensor_read_written(c.residual, "residual");
    double *report = test_tensor_read_written(c.report, "report");
    for (int64_t b = 0; b < v->matrices; b++) {
        CHECK(report[b] == TCH_REPORT_OK, "matrix %lld is reported as %g, root %d by %s, residual %.3g", (long long)b,
              report[b], root, tch_root_method_name(config->method), residual[b]);
    }
    test_tensor_check_written(c.out, "out");
    for (int64_t b = 0; b < v->matrices; b++) {
        const known_matrix *known = test_known_of(v, b, condition, dtype);
        check_error(known, root, config, x + b * size, dtype);
        check_certificate(known, root, config, x + b * size, residual[b], dtype);
    }
}

static tch_root_config config_with(tch_root_method method, double eps)
{
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.method = method;
    config.eps = eps;
    return config;
}

/* Every layout and size, with alternating roots and methods; test_root_errors.c has every root by every method. */
static void check_layouts(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    size_t which = (size_t)v->in + (size_t)v->out + (size_t)v->stream;
    tch_root_config config = config_with(method_at(which), dtype.bits == 16 ? 0.1 : 1e-3);
    config.exact_residual = (int32_t)(which / 4 % 2);
    check_roots(context, v, usual_condition(dtype), dtype, roots[which / 2 % 6], &config);
}

TEST(layouts)
{
    test_for_each_dtype(*state, "inverse_root", 200, 65, check_layouts);
}

static void name_root(const char *what, int64_t n, tch_dtype dtype, int32_t root, const tch_root_config *config)
{
    test_case("%s: n = %lld, %s, root %d by %s, eps %g, relative_eps %g, tolerance %g, degree %d", what, (long long)n,
              tch_dtype_name(dtype), root, tch_root_method_name(config->method), config->eps, config->relative_eps,
              config->tolerance, config->degree);
}

/* A previous root is kept if the new one is not good enough. Here the spectrum is unknown, and its small end is below
 * float64's rounding error. */
TEST(the_previous_root_is_kept)
{
    tch_root_config config = config_with(TCH_ROOT_NEWTON, 0.0);
    test_variation v = {.n = 64, .matrices = 1};
    name_root("kept", 64, TCH_FLOAT64, 4, &config);
    root_call c = make_call(*state, &v, 1e17, TCH_FLOAT64);
    CHECK_OK(tch_inverse_root(*state, &c.a->tensor, 4, &config, &c.out->tensor, NULL, &c.report->tensor));
    CHECK(*test_tensor_read_written(c.report, "report") != TCH_REPORT_OK, "a root of a singular matrix was certified");
    test_tensor_check_unchanged(c.out, "out");
}

/* Methods fail immediately if they cannot reach a tolerance for any input, or if the device does not support them. */
TEST(refused_calls_write_nothing)
{
    for (int method = TCH_ROOT_NEWTON; method <= TCH_ROOT_RATIONAL; method++) {
        bool offered = test_offers_method((tch_root_method)method);
        tch_root_config config = config_with((tch_root_method)method, offered ? 0.0 : 1e-3);
        test_variation v = {.n = 20, .matrices = 1};
        config.relative_eps = offered ? 1e-12 : 0.0;
        config.tolerance = offered ? 1e-18 : 0.0;
        name_root(offered ? "impossible" : "not offered", 20, TCH_FLOAT64, 4, &config);
        root_call c = make_call(*state, &v, 100.0, TCH_FLOAT64);
        tch_status got = tch_inverse_root(*state, &c.a->tensor, 4, &config, &c.out->tensor, NULL, NULL);
        CHECK(offered ? got == TCH_ERR_INVALID_ARGUMENT || got == TCH_ERR_NUMERIC
                      : got == TCH_ERR_UNSUPPORTED && strstr(tch_last_error(), "rational") != NULL,
              "gave %s: %s", tch_status_name(got), tch_last_error());
        test_tensor_check_unchanged(c.out, "out");
    }
}

/* The plan has the method that `auto` chooses, or an explicitly chosen method. */
TEST(plans)
{
    tch_context *context = *state;
    for (int i = 0; i < 4; i++) {
        tch_root_config config = config_with(method_at(i), 0.0);
        tch_root_method method = TCH_ROOT_AUTO;
        int64_t bytes = -1;
        config.relative_eps = 1e-4;
        name_root("plan", 256, TCH_FLOAT32, 4, &config);
        CHECK_OK(tch_inverse_root_plan(context, TCH_FLOAT32, 8, 256, 4, &config, &method, &bytes));
        CHECK(method != TCH_ROOT_AUTO, "auto is no plan");
        CHECK(i == 0 || method == method_at(i), "the plan is %s", tch_root_method_name(method));
        CHECK(bytes > 0, "%lld bytes of scratch", (long long)bytes);
    }
}

TEST_MAIN(test_open_context, test_close_known)
