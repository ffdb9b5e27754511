/* Decisions of the inverse root. See docs/numerics/inverse-roots.md for the measurements behind the constants. */
#include "root_plan.h"

#include <math.h>
#include <string.h>

#include "core/status.h"
#include "core/tensor.h"

#include "algebra.h"
#include "batch.h"

/* From these sizes on the rational method beats the eigen method on the CPU (bench/logs/inverse_root.md): the first if
 * few poles reach the tolerance, the second if many are needed. */
#define RATIONAL_FROM 64
#define RATIONAL_FROM_TIGHT 768
#define TIGHT 1e-5

/* Without damping nothing is known about the smallest eigenvalue. Newton and rational, if requested, assume this, and
 * the certificate tells whether it held. */
#define ASSUMED_LOW 1e-10

/* If there is no better method, errors up to this are accepted: a larger residual is a wrong root, not an inaccurate
 * one. */
#define MOST_RESIDUAL 0.1

#define NEWTON_GROWTH 16.0
#define UNIT_F32 0x1p-24
#define UNIT_F64 0x1p-53

static const char *const method_names[] = {"auto", "eigen", "newton", "rational"};

const char *tch_root_method_name(tch_root_method method)
{
    return (int)method >= 0 && (int)method <= TCH_ROOT_RATIONAL ? method_names[method] : "unknown";
}

static tch_status check_number(const char *name, double value)
{
    if (isfinite(value) && value >= 0) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "config: %s is %g, expected a finite number, 0 or more", name, value);
}

tch_status tchi_root_check(int32_t root, const tch_root_config *c)
{
    if (root != 1 && root != 2 && root != 3 && root != 4 && root != 6 && root != 8) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "root is %d, expected 1, 2, 3, 4, 6 or 8; tch_matrix_power takes any power", root);
    }
    if (c->struct_size != sizeof *c) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "config: struct_size is %zu, expected %zu; start from TCH_ROOT_CONFIG_INIT", c->struct_size,
                         sizeof *c);
    }
    TCHI_TRY(check_number("eps", c->eps));
    TCHI_TRY(check_number("relative_eps", c->relative_eps));
    TCHI_TRY(check_number("tolerance", c->tolerance));
    if ((int)c->method < TCH_ROOT_AUTO || (int)c->method > TCH_ROOT_RATIONAL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "config: method is %d, expected one of tch_root_method",
                         (int)c->method);
    }
    if (c->degree < 0 || c->degree > 2) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "config: degree is %d, expected 1, 2, or 0 to choose", c->degree);
    }
    return TCH_OK;
}

/* A relative error u in the matrix is an error u / (p low) in the smallest eigenvalues of the root, which methods
 * amplify by this factor. Measured in float32 for n = 64 to 1024, low = 1e-3 to 1e-5, p = 1 to 8 and six kinds of
 * spectra (bench/logs/inverse_root.md): up to n = 256 at most 4.2 by the eigen method and 3.4 by the rational one,
 * whose poles use another quarter of the tolerance; then growing as sqrt(n) on flat spectra, to 7.0 and 5.7, which the
 * certificate catches: those errors are spread over many directions, where its estimate is accurate. On a GPU, i.e. on
 * backends with product rates, the eigen method reaches 11 up to n = 128 and 23 at 1024, and there is no second attempt
 * if the caller passed a report. The Newton iteration adds errors in every product and can diverge: in float32
 * throughout it failed its certificate at n = 512, low = 1e-6. */
static double growth_of(const tchi_root_plan *p, int64_t n)
{
    if (p->method == TCH_ROOT_NEWTON) {
        return NEWTON_GROWTH;
    }
    return p->mixed ? fmax(16.0, 0.8 * sqrt((double)n)) : fmax(6.0, 0.2 * sqrt((double)n));
}

static tch_scalar choose_type(const tchi_root_plan *p, tch_scalar type, int64_t n)
{
    if (type == TCH_SCALAR_F64 || p->low == 0) {
        return TCH_SCALAR_F64;
    }
    double error = growth_of(p, n) * UNIT_F32 / (p->low * p->root);
    return error <= p->tolerance ? TCH_SCALAR_F32 : TCH_SCALAR_F64;
}

/* Whether float64 throughout could keep Newton's error below the tolerance. */
static bool newton_reaches(const tchi_root_plan *p, double low)
{
    return NEWTON_GROWTH * UNIT_F64 / (low * p->root) <= p->tolerance;
}

/* A backend that reports product rates is one with fast products: Newton. The CPU uses the rational method instead. */
static tch_root_method choose_method(const tch_context *context, const tchi_root_plan *p, int64_t n, bool damped)
{
    int64_t from = p->tolerance < TIGHT ? RATIONAL_FROM_TIGHT : RATIONAL_FROM;
    if (!damped) {
        return TCH_ROOT_EIGEN;
    }
    if (context->backend->matrix->shifted_inverse != NULL) {
        return n >= from ? TCH_ROOT_RATIONAL : TCH_ROOT_EIGEN;
    }
    return p->mixed && (p->low == 0 || newton_reaches(p, p->low)) ? TCH_ROOT_NEWTON : TCH_ROOT_EIGEN;
}

/* Probes may underestimate an error that is spread over many directions by this factor. */
#define SPREAD 1.1

/* The certificate bounds the error itself (docs/numerics/inverse-roots.md). The eigen method in float64 has no
 * fallback, so only wrong roots fail. */
static double error_allowed(const tchi_root_plan *p)
{
    bool last = p->method == TCH_ROOT_EIGEN && p->type == TCH_SCALAR_F64;
    double allowed = p->probes > 0 ? p->tolerance / SPREAD : p->tolerance;
    return last ? fmax(allowed, MOST_RESIDUAL / p->root) : allowed;
}

/* Rounding the entries of a semidefinite matrix moves its eigenvalues by about u sqrt(n) times the largest. */
double tchi_root_negative(tch_scalar type, int64_t n)
{
    static const double unit[] = {
        [TCH_SCALAR_F64] = 0x1p-53, [TCH_SCALAR_F32] = 0x1p-24, [TCH_SCALAR_F16] = 0x1p-11, [TCH_SCALAR_BF16] = 0x1p-8};
    return 4.0 * unit[type] * sqrt((double)n);
}

tch_status tchi_root_plan_make(const tch_context *context, tch_scalar type, int64_t n, int32_t root,
                               const tch_root_config *config, tchi_root_plan *plan)
{
    static const tch_root_config defaults = TCH_ROOT_CONFIG_INIT;
    const tch_root_config *c = config != NULL ? config : &defaults;
    TCHI_TRY(tchi_root_check(root, c));
    *plan = (tchi_root_plan){.root = root, .eps = c->eps, .relative_eps = c->relative_eps};
    plan->newton.root = root;
    plan->newton.degree = c->degree;
    plan->mixed = context->backend->matrix->product_rates != NULL;
    plan->rates = tchi_product_rates(context);
    plan->one_launch = context->backend->matrix->newton != NULL && n <= plan->rates.newton_limit;
    plan->tolerance = c->tolerance > 0 ? c->tolerance : type == TCH_SCALAR_F64 ? 1e-9 : 1e-3;
    plan->probes = c->exact_residual ? 0 : 4;
    plan->negative = tchi_root_negative(type, n);
    plan->estimate = 0.01 * plan->tolerance;
    /* The scaled matrix is (A + d I) / b with d >= r l and b <= d + margin l, l the largest eigenvalue. */
    plan->low = c->relative_eps > 0 ? c->relative_eps / (c->relative_eps + TCHI_ROOT_MARGIN) : 0.0;
    bool damped = c->eps > 0 || c->relative_eps > 0;
    plan->fall_back = c->method == TCH_ROOT_AUTO;
    plan->method = c->method == TCH_ROOT_AUTO ? choose_method(context, plan, n, damped) : c->method;
    plan->type = choose_type(plan, type, n);
    plan->widest = TCH_SCALAR_F64;
    if (plan->method == TCH_ROOT_NEWTON && plan->mixed) {
        plan->type = tchi_compute_type(type);
    }
    plan->error = error_allowed(plan);
    if (plan->method == TCH_ROOT_RATIONAL && context->backend->matrix->shifted_inverse == NULL) {
        return tchi_fail(TCH_ERR_UNSUPPORTED, "config: method rational is not offered by the %s backend",
                         context->backend->name);
    }
    bool must_look = plan->method != TCH_ROOT_EIGEN && c->relative_eps == 0 && c->eps > 0;
    return must_look ? TCH_OK : tchi_root_plan_finish(plan, plan->low);
}

/* A looser tolerance is planned as this: steps that end further from convergence leave errors that do not commute with
 * the matrix, which the certificate amplifies. At a tolerance of 3e-2 and low = 1e-6 none of 3 matrices with n = 3072
 * passed. */
#define LOOSEST 1e-2

/* And the arithmetic as this: with fewer float64 steps the certificate of matrices of rank n / 2 exceeded the limit,
 * for root 2 and low = 1e-6 in the model of tests/linalg/roots/test_newton.c. */
#define LOOSEST_ARITHMETIC 1e-3

static double arithmetic_tolerance(const tchi_root_plan *p)
{
    return fmin(p->tolerance, LOOSEST_ARITHMETIC);
}

/* In the arithmetic of each step, if steps have their own. The kernel that runs all steps in one launch has no final
 * polynomial. */
static double cost_of(const tchi_root_plan *p, tchi_newton_plan *newton, double low)
{
    static const tch_product_rates one = {.f64 = 1.0};
    if (p->one_launch) {
        tchi_newton_shorten(newton, 0.25 * p->newton_tolerance);
    } else {
        tchi_newton_end(newton, 0.25 * p->newton_tolerance);
    }
    if (!p->mixed || p->one_launch) {
        return tchi_newton_cost(newton, &one); /* types are chosen later: all are still the first, float64 */
    }
    tchi_newton_choose_types(newton, &p->rates, low, arithmetic_tolerance(p));
    return tchi_newton_cost(newton, &p->rates);
}

/* The cheaper degree, unless the caller chose one, or a mix of degrees. */
static int plan_newton(tchi_root_plan *p, double low)
{
    double best = -1.0;
    int only = p->newton.degree;
    p->newton_tolerance = p->mixed ? fmin(p->tolerance, LOOSEST) : p->tolerance;
    for (int degree = 1; degree <= 2; degree++) {
        tchi_newton_plan tried = {.root = p->root, .degree = degree, .steps = -1};
        if (only == 0 || only == degree) {
            tried.steps = tchi_minimax_plan(p->root, degree, low, 0.25 * p->newton_tolerance, tried.step);
        }
        double cost = tried.steps < 0 ? -1.0 : cost_of(p, &tried, low);
        if (tried.steps >= 0 && (best < 0.0 || cost < best)) {
            best = cost;
            p->newton = tried;
        }
    }
    if (best >= 0.0 && only == 0 && p->mixed && !p->one_launch) {
        tchi_newton_steepen(&p->newton, &p->rates, low, 0.25 * p->newton_tolerance, arithmetic_tolerance(p));
    }
    return best < 0.0 ? -1 : p->newton.steps;
}

/* Caches the thread's last plan: callers request the same root repeatedly, and choosing among degrees takes as long as
 * several products of a small matrix. */
static int find_newton(tchi_root_plan *p, double low)
{
    static _Thread_local struct {
        double key[11];
        int found;
        double newton_tolerance;
        tchi_newton_plan newton;
    } memo;
    const tch_product_rates *r = &p->rates;
    const double key[] = {p->root, p->newton.degree, p->mixed,  p->one_launch, low,     p->tolerance,
                          r->f64,  r->f32,           r->bf16x2, r->bf16,       r->f16x2};
    bool known = true;
    for (size_t i = 0; i < sizeof key / sizeof *key; i++) {
        known = known && memo.key[i] == key[i];
    }
    if (!known) {
        memo.found = plan_newton(p, low);
        memo.newton = p->newton;
        memo.newton_tolerance = p->newton_tolerance;
        memcpy(memo.key, key, sizeof key);
    }
    p->newton = memo.newton;
    p->newton_tolerance = memo.newton_tolerance;
    return memo.found;
}

/* Products round X by u of its norm in every direction. The certificate amplifies the part between the directions of
 * the largest and the smallest eigenvalue by low^(-h/root) with h = floor(root/2), and cannot tell it from an error of
 * that size; for root 1 its square appears instead. A matrix of low rank, whose damped null space has many of the
 * smallest directions, shows all of it: measured on an H200 at low = 1e-6, n = 256 to 1024, root 4 and ranks from n/16
 * to 3n/4, in split bfloat16, residuals of 0.033 to 0.057 with an error of X of 2e-4, i.e. |X R| / (p |X|) up to 0.028;
 * up to 0.035 in the model of tests/linalg/roots/test_newton.c. Other seeds of the model reached 0.050, and 0.108 for
 * root 2: such draws of rank n/2 do not pass. */
static double rounding_shown(const tchi_root_plan *p, double low)
{
    static const double unit[TCH_SCALAR_COUNT] = {[TCH_SCALAR_F64] = 0x1p-53,
                                                  [TCH_SCALAR_F32] = 0x1p-24,
                                                  [TCH_SCALAR_BF16] = 0x1p-9,
                                                  [TCH_SCALAR_BF16X2] = 0x1p-17};
    double worst = unit[p->type];
    for (int k = 0; k < p->newton.steps && !p->one_launch; k++) {
        worst = fmax(worst, unit[p->newton.type[k]]);
    }
    int32_t half = p->root / 2;
    double power = p->root == 1 ? 0.5 : (double)half / p->root;
    return fmin(20.0 * worst * pow(low, -power), 2.0 * MOST_RESIDUAL) / p->root;
}

/* One type for all steps if the backend computes in the matrices' own; otherwise each step's fastest. */
static void plan_types(tchi_root_plan *p, double low)
{
    tchi_newton_plan *newton = &p->newton;
    if (p->mixed) {
        tchi_newton_choose_types(newton, &p->rates, low, arithmetic_tolerance(p));
        p->error = fmax(p->error, p->method == TCH_ROOT_NEWTON ? rounding_shown(p, low) : 0.0);
    } else {
        for (int k = 0; k < newton->steps; k++) {
            newton->type[k] = p->type;
        }
    }
    p->widest = newton->steps == 0 ? p->type : tchi_newton_type_of_m(newton, 0);
}

/* Caches the poles of the thread's last plan: callers request the same root repeatedly, and finding the poles takes as
 * long as the root of a matrix of size 100. */
typedef struct pole_memo {
    int root, count;
    double low, tolerance, error;
    double shifts[TCHI_MINIMAX_MAX_POLES], weights[TCHI_MINIMAX_MAX_POLES];
} pole_memo;

static int plan_rational(tchi_root_plan *p, double low)
{
    static _Thread_local pole_memo memo;
    double tolerance = 0.25 * p->tolerance;
    if (memo.root != p->root || memo.low != low || memo.tolerance != tolerance) {
        memo = (pole_memo){.root = p->root, .low = low, .tolerance = tolerance};
        memo.count = tchi_minimax_poles(p->root, low, tolerance, memo.shifts, memo.weights, &memo.error);
    }
    p->poles = memo.count;
    memcpy(p->shifts, memo.shifts, sizeof p->shifts);
    memcpy(p->weights, memo.weights, sizeof p->weights);
    return p->poles < 1 || memo.error > p->tolerance ? -1 : p->poles;
}

tch_status tchi_root_plan_finish(tchi_root_plan *plan, double low)
{
    plan->low = low > 0 ? fmin(low, 0.999) : ASSUMED_LOW;
    plan->ready = true;
    if (plan->method == TCH_ROOT_NEWTON && plan->mixed && plan->fall_back && !newton_reaches(plan, plan->low)) {
        *plan = tchi_root_plan_better(plan);
        return TCH_OK;
    }
    int found = plan->method == TCH_ROOT_NEWTON     ? find_newton(plan, plan->low)
                : plan->method == TCH_ROOT_RATIONAL ? plan_rational(plan, plan->low)
                                                    : 0;
    if (found >= 0) {
        plan_types(plan, plan->low);
        return TCH_OK;
    }
    if (plan->fall_back) {
        *plan = tchi_root_plan_better(plan);
        return TCH_OK;
    }
    return tchi_fail(
        TCH_ERR_INVALID_ARGUMENT,
        "method %s cannot reach an error of %g when the smallest eigenvalue may be %.3g of the largest; add "
        "damping, loosen the tolerance, or use the eigen method",
        tch_root_method_name(plan->method), plan->tolerance, plan->low);
}

bool tchi_root_plan_has_better(const tchi_root_plan *plan)
{
    return plan->method == TCH_ROOT_EIGEN ? plan->type != TCH_SCALAR_F64 : plan->fall_back;
}

tchi_root_plan tchi_root_plan_better(const tchi_root_plan *plan)
{
    tchi_root_plan better = *plan;
    better.method = TCH_ROOT_EIGEN;
    better.type = TCH_SCALAR_F64;
    better.fall_back = false;
    better.error = error_allowed(&better);
    return better;
}
