/* Decisions of the inverse root. See docs/numerics/inverse-roots.md for the measurements behind the constants. */
#include "root_plan.h"

#include <math.h>
#include <string.h>

#include "core/status.h"
#include "core/tensor.h"

#include "algebra.h"
#include "batch.h"

/* From these sizes on the rational method beats the eigen method on the CPU (bench/ladder/inverse_root.md): at once where
 * few poles reach the tolerance, later where many are needed. */
#define RATIONAL_FROM 64
#define RATIONAL_FROM_TIGHT 768
#define TIGHT 1e-5

/* Without damping nothing is known of the smallest eigenvalue. Newton and rational, when asked for by name, are prepared
 * for this much, and the certificate tells whether it was enough. */
#define ASSUMED_LOW 1e-10

/* What the certificate may show at most: above it a root is nonsense rather than rounded. */
#define MOST_RESIDUAL 0.1

#define UNIT_F32 0x1p-24
#define UNIT_F64 0x1p-53

static const double growths[] = {[TCH_ROOT_EIGEN] = 4.0, [TCH_ROOT_NEWTON] = 16.0, [TCH_ROOT_RATIONAL] = 0.5};

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

/* A relative error u in the matrix is an error u / (p low) in the smallest eigenvalues of the root. Measured in float32
 * for n = 64 to 1024, low = 1e-3 to 1e-7, p = 2 to 8 and two kinds of spectra, the error was at most 2.6 times that by
 * the eigen method and 0.33 times by the rational one. The Newton iteration adds errors in every product and can diverge
 * on them: in float32 throughout it failed its certificate at n = 512, low = 1e-6. */
static tch_scalar choose_type(const tchi_root_plan *p, tch_scalar type)
{
    if (type == TCH_SCALAR_F64 || p->low == 0) {
        return TCH_SCALAR_F64;
    }
    double growth = growths[p->method];
    return growth * UNIT_F32 / (p->low * p->root) <= p->tolerance ? TCH_SCALAR_F32 : TCH_SCALAR_F64;
}

/* Whether float64 throughout could keep Newton's error below the tolerance. */
static bool newton_reaches(const tchi_root_plan *p, double low)
{
    return growths[TCH_ROOT_NEWTON] * UNIT_F64 / (low * p->root) <= p->tolerance;
}

/* A backend that knows the rates of its products is one on which products are what is fast: Newton. The CPU has the
 * rational method instead. */
static tch_root_method choose_method(const tch_context *context, const tchi_root_plan *p, int64_t n, bool damped)
{
    int64_t from = p->tolerance < TIGHT ? RATIONAL_FROM_TIGHT : RATIONAL_FROM;
    if (!damped) {
        return TCH_ROOT_EIGEN;
    }
    if (context->backend->shifted_inverse != NULL) {
        return n >= from ? TCH_ROOT_RATIONAL : TCH_ROOT_EIGEN;
    }
    return p->mixed && (p->low == 0 || newton_reaches(p, p->low)) ? TCH_ROOT_NEWTON : TCH_ROOT_EIGEN;
}

static bool is_one_launch(const tch_context *context, int64_t n)
{
    const tch_backend *t = context->backend;
    return t->newton != NULL && t->newton_limit != NULL && n <= t->newton_limit(context->state);
}

/* An error e of X in every direction is p e in the certificate; the factor 4 leaves room for the spread of the random
 * probes. The eigen method has no better to fall back on, so only nonsense is refused. */
static double residual_allowed(const tchi_root_plan *p)
{
    double allowed = 4.0 * p->root * p->tolerance;
    return p->method == TCH_ROOT_EIGEN ? fmax(allowed, MOST_RESIDUAL) : allowed;
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
    plan->mixed = context->backend->product_rates != NULL;
    plan->one_launch = is_one_launch(context, n);
    plan->rates = tchi_product_rates(context);
    plan->tolerance = c->tolerance > 0 ? c->tolerance : type == TCH_SCALAR_F64 ? 1e-9 : 1e-3;
    plan->probes = c->exact_residual ? 0 : 4;
    plan->negative = tchi_root_negative(type, n);
    plan->estimate = 0.01 * plan->tolerance;
    /* The scaled matrix is (A + d I) / b with d >= r l and b <= d + margin l, l the largest eigenvalue. */
    plan->low = c->relative_eps > 0 ? c->relative_eps / (c->relative_eps + TCHI_ROOT_MARGIN) : 0.0;
    bool damped = c->eps > 0 || c->relative_eps > 0;
    plan->fall_back = c->method == TCH_ROOT_AUTO;
    plan->method = c->method == TCH_ROOT_AUTO ? choose_method(context, plan, n, damped) : c->method;
    plan->type = choose_type(plan, type);
    plan->widest = TCH_SCALAR_F64;
    if (plan->method == TCH_ROOT_NEWTON && plan->mixed) {
        plan->type = tchi_compute_type(type);
    }
    plan->residual = residual_allowed(plan);
    if (plan->method == TCH_ROOT_RATIONAL && context->backend->shifted_inverse == NULL) {
        return tchi_fail(TCH_ERR_UNSUPPORTED, "config: method rational is not offered by the %s backend",
                         context->backend->name);
    }
    bool must_look = plan->method != TCH_ROOT_EIGEN && c->relative_eps == 0 && c->eps > 0;
    return must_look ? TCH_OK : tchi_root_plan_finish(plan, plan->low);
}

/* The degree with fewer products, unless the caller chose. */
static int plan_newton(tchi_root_plan *p, double low)
{
    int best = -1;
    int only = p->newton.degree;
    for (int degree = 1; degree <= 2; degree++) {
        tchi_minimax_step step[TCHI_MINIMAX_MAX_STEPS];
        int steps =
            only == 0 || only == degree ? tchi_minimax_plan(p->root, degree, low, 0.25 * p->tolerance, step) : -1;
        int products = steps < 0 ? -1 : tchi_minimax_plan_products(p->root, degree, steps);
        if (steps >= 0 && (best < 0 || products < best)) {
            best = products;
            p->newton.degree = degree;
            p->newton.steps = steps;
            memcpy(p->newton.step, step, sizeof step);
            best -= tchi_newton_shorten(&p->newton, 0.25 * p->tolerance);
        }
    }
    return best;
}

/* Products round X by u of its norm in every direction, and the certificate shows what that is in the direction of the
 * largest eigenvalue against that of the smallest: u / sqrt(low). A matrix of low rank, whose damped null space holds many
 * of the smallest, shows all of it: measured on an H200 at low = 1e-6, n = 256 to 1024 and ranks from n/16 to 3n/4, in split
 * bfloat16, 0.033 to 0.057 where the error of X was 2e-4, which is 4 to 8 times that. */
static double residual_of_rounding(const tchi_newton_plan *newton, double low)
{
    static const double unit[TCH_SCALAR_COUNT] = {[TCH_SCALAR_F64] = 0x1p-53,
                                                  [TCH_SCALAR_F32] = 0x1p-24,
                                                  [TCH_SCALAR_BF16] = 0x1p-9,
                                                  [TCH_SCALAR_BF16X2] = 0x1p-17};
    double worst = 0.0;
    for (int k = 0; k < newton->steps; k++) {
        worst = fmax(worst, unit[newton->type[k]]);
    }
    return fmin(10.0 * worst / sqrt(low), MOST_RESIDUAL);
}

/* One type for all steps where the backend computes in the matrices' own; else each step's fastest. */
static void plan_types(tchi_root_plan *p, double low)
{
    tchi_newton_plan *newton = &p->newton;
    if (p->mixed) {
        tchi_newton_choose_types(newton, &p->rates, low, p->tolerance);
        p->residual = fmax(p->residual, p->method == TCH_ROOT_NEWTON ? residual_of_rounding(newton, low) : 0.0);
    } else {
        for (int k = 0; k < newton->steps; k++) {
            newton->type[k] = p->type;
        }
    }
    p->widest = newton->steps == 0 ? p->type : tchi_newton_type_of_m(newton, 0);
}

/* The poles of a thread's last plan: a caller asks for the same root again and again, and finding the poles takes as long
 * as the root of a matrix of size 100. */
typedef struct pole_memo {
    int root, count;
    double low, tolerance, error;
    double shifts[TCHI_MINIMAX_MAX_POLES], weights[TCHI_MINIMAX_MAX_POLES];
} pole_memo;

static const pole_memo *find_poles(int root, double low, double tolerance)
{
    static _Thread_local pole_memo memo;
    if (memo.root != root || memo.low != low || memo.tolerance != tolerance) {
        memo = (pole_memo){.root = root, .low = low, .tolerance = tolerance};
        memo.count = tchi_minimax_poles(root, low, tolerance, memo.shifts, memo.weights, &memo.error);
    }
    return &memo;
}

static int plan_rational(tchi_root_plan *p, double low)
{
    const pole_memo *memo = find_poles(p->root, low, 0.25 * p->tolerance);
    p->poles = memo->count;
    memcpy(p->shifts, memo->shifts, sizeof p->shifts);
    memcpy(p->weights, memo->weights, sizeof p->weights);
    return p->poles < 1 || memo->error > p->tolerance ? -1 : p->poles;
}

tch_status tchi_root_plan_finish(tchi_root_plan *plan, double low)
{
    plan->low = low > 0 ? fmin(low, 0.999) : ASSUMED_LOW;
    plan->ready = true;
    if (plan->method == TCH_ROOT_NEWTON && plan->mixed && plan->fall_back && !newton_reaches(plan, plan->low)) {
        *plan = tchi_root_plan_fallback(plan);
        return TCH_OK;
    }
    int found = plan->method == TCH_ROOT_NEWTON     ? plan_newton(plan, plan->low)
                : plan->method == TCH_ROOT_RATIONAL ? plan_rational(plan, plan->low)
                                                    : 0;
    if (found >= 0) {
        plan_types(plan, plan->low);
        return TCH_OK;
    }
    if (plan->fall_back) {
        *plan = tchi_root_plan_fallback(plan);
        return TCH_OK;
    }
    return tchi_fail(
        TCH_ERR_INVALID_ARGUMENT,
        "method %s cannot reach an error of %g when the smallest eigenvalue may be %.3g of the largest; add "
        "damping, loosen the tolerance, or use the eigen method",
        tch_root_method_name(plan->method), plan->tolerance, plan->low);
}

void tchi_root_plan_give(tchi_root_plan *plan, tch_scalar type, const tchi_foreign_root *foreign)
{
    plan->foreign = foreign;
    plan->method = TCH_ROOT_NEWTON;
    plan->one_launch = plan->ready = true;
    plan->mixed = plan->fall_back = false;
    plan->type = tchi_compute_type(type);
    plan->residual = residual_allowed(plan);
}

tchi_root_plan tchi_root_plan_fallback(const tchi_root_plan *plan)
{
    tchi_root_plan eigen = *plan;
    eigen.method = TCH_ROOT_EIGEN;
    eigen.type = TCH_SCALAR_F64;
    eigen.fall_back = false;
    eigen.residual = residual_allowed(&eigen);
    return eigen;
}
