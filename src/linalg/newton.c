/* The coupled iteration of docs/numerics/minimax.md: H = q(M), X <- X H, M <- H^p M, until M is the identity. All
 * iterates are polynomials in one symmetric matrix, so every product is symmetric and half of it suffices. */
#include "newton.h"

#include <math.h>

#include "core/arith.h"
#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "gram_schmidt.h"

/* --- arithmetic ------------------------------------------------------------------------------------------------- */

/* The error in X of steps from an interval [low, 2 - low] on, computed in a type: a part that grows as the small
 * eigenvalues approach the rounding error of M, and a floor from X's own products. Float32 and the split type were
 * measured on an H200 at n = 1024 for p = 4 with degree 2 (docs/numerics/inverse-roots.md) and rounded up. */
static double error_of(tch_scalar type, double low)
{
    switch (type) {
    case TCH_SCALAR_F64:
        return 4e-16 / low;
    case TCH_SCALAR_F32:
        return 2.4e-7 / low + 4e-6;
    case TCH_SCALAR_BF16X2:
        return 8e-7 / low + 2e-5;
    default:
        return 1.0;
    }
}

/* Half the tolerance is for arithmetic, the other half for the polynomials and the rounding of the input. */
static tch_scalar fastest_type(const tch_product_rates *rates, double low, double tolerance)
{
    const struct {
        tch_scalar type;
        double rate;
    } types[] = {{TCH_SCALAR_F64, rates->f64}, {TCH_SCALAR_F32, rates->f32}, {TCH_SCALAR_BF16X2, rates->bf16x2}};
    int best = 0;
    for (int i = 1; i < 3; i++) {
        if (types[i].rate > types[best].rate && error_of(types[i].type, low) <= 0.5 * tolerance) {
            best = i;
        }
    }
    return types[best].type;
}

/* Congruent steps in the split type, in a model of the arithmetic at n = 384 with four kinds of spectra: error at most
 * 5.9e-4 for low down to 1e-8 and p = 2, 4, 8 (docs/numerics/inverse-roots.md). */
#define CONGRUENT_TOLERANCE 6e-4
#define CONGRUENT_LOW 1e-8

static bool is_steep(const tchi_minimax_step *step)
{
    return step->c[4] != 0.0;
}

/* Plans with steps of degree 4 leave the exact types later. In the model of bench/logs/inverse_root.md a split step
 * from low = 2e-3 or 4e-3 on has 1.4 times the residual of plans of degree 2 that use it later. */
#define STEEP_MARGIN 3.0

static double margin_of(const tchi_newton_plan *plan)
{
    for (int k = 0; k + (plan->ends > 0) < plan->steps; k++) {
        if (is_steep(&plan->step[k])) {
            return STEEP_MARGIN;
        }
    }
    return 1.0;
}

/* Intervals only shrink, so types only get faster from step to step. Degree 1 computes H elementwise, which the split
 * type does not support. */
void tchi_newton_choose_types(tchi_newton_plan *plan, const tch_product_rates *rates, double low, double tolerance)
{
    tch_product_rates offered = *rates;
    offered.bf16x2 = plan->degree == 2 ? rates->bf16x2 : 0.0;
    bool congruence =
        plan->root % 2 == 0 && offered.bf16x2 > offered.f64 && tolerance >= CONGRUENT_TOLERANCE && low >= CONGRUENT_LOW;
    double margin = margin_of(plan);
    for (int k = 0; k < plan->steps; k++) {
        plan->type[k] = fastest_type(&offered, k == 0 ? low : plan->step[k - 1].lo, tolerance / margin);
        plan->congruent[k] = congruence && plan->type[k] == TCH_SCALAR_F64 && k + 1 < plan->steps;
        plan->type[k] = plan->congruent[k] ? TCH_SCALAR_BF16X2 : plan->type[k];
    }
}

bool tchi_newton_shorten(tchi_newton_plan *plan, double tolerance)
{
    int last = plan->steps - 1;
    tchi_minimax_step shorter;
    if (plan->degree == 1 || last < 1 ||
        tchi_minimax_polynomial(plan->root, 1, plan->step[last - 1].lo, plan->step[last - 1].hi, &shorter) != 0 ||
        fmax(pow(shorter.hi, 1.0 / plan->root) - 1.0, 1.0 - pow(shorter.lo, 1.0 / plan->root)) > tolerance) {
        return false;
    }
    shorter.c[2] = 0.0;
    plan->step[last] = shorter;
    return true;
}

/* H^root by squaring and multiplying; H^3 twice for 6. */
static int power_products(int32_t root)
{
    return root == 1 ? 0 : root == 2 ? 1 : root <= 4 ? 2 : 3;
}

/* Products of step k in its own type: H, X H, and for M the power of H and its product with M. */
static int products_of(const tchi_newton_plan *plan, int k)
{
    bool last = k + 1 == plan->steps;
    if (last && plan->ends) {
        return plan->ends / 2 + 1;
    }
    bool short_one = last && plan->steps > 1 && plan->step[k].c[2] == 0.0 && plan->degree == 2;
    int products = (k > 0) + (short_one ? 0 : plan->degree - 1 + is_steep(&plan->step[k]));
    if (plan->congruent[k]) { /* T T', preceded by K T in full, or K L */
        return products + power_products(plan->root / 2) + (k == 0 ? 2 : 3);
    }
    return products + (last ? 0 : power_products(plan->root) + 1);
}

/* Cholesky in units of symmetric float64 products: a third of the work at about 0.4 of the speed. */
#define CHOLESKY 0.85

double tchi_newton_cost(const tchi_newton_plan *plan, const tch_product_rates *rates)
{
    double cost = 0.0;
    for (int k = 0; k < plan->steps; k++) {
        double rate = plan->type[k] == TCH_SCALAR_F64   ? rates->f64
                      : plan->type[k] == TCH_SCALAR_F32 ? rates->f32
                                                        : rates->bf16x2;
        cost += products_of(plan, k) / rate + (k == 0 && plan->congruent[k] ? CHOLESKY / rates->f64 : 0.0);
    }
    return cost;
}

/* The plan with its last step at k. */
static tchi_newton_plan ended_at(const tchi_newton_plan *plan, int k, const tchi_minimax_quartic *ending)
{
    tchi_newton_plan ended = *plan;
    ended.steps = k + 1;
    ended.ends = 4;
    ended.ending = *ending;
    return ended;
}

static int all_products(const tchi_newton_plan *plan)
{
    int products = 0;
    for (int k = 0; k < plan->steps; k++) {
        products += products_of(plan, k);
    }
    return products;
}

void tchi_newton_end(tchi_newton_plan *plan, double tolerance)
{
    tchi_newton_plan steps = *plan;
    tchi_newton_shorten(&steps, tolerance);
    int k = plan->root == 1 ? plan->steps : 1; /* steps of root 1 have three products anyway */
    double error = INFINITY;
    tchi_minimax_quartic ending;
    while (k < plan->steps &&
           (tchi_minimax_ending(plan->root, plan->step[k - 1].lo, plan->step[k - 1].hi, &ending, &error) != 0 ||
            error > tolerance)) {
        k++;
    }
    if (k < plan->steps) {
        tchi_newton_plan ended = ended_at(plan, k, &ending);
        *plan = all_products(&ended) < all_products(&steps) ? ended : steps;
    } else {
        *plan = steps;
    }
}

/* --- steps of degree 4 -------------------------------------------------------------------------------------------- */

/* The search state: the request, and the best plan so far with its error and cost. */
typedef struct search {
    const tch_product_rates *rates;
    double low, tolerance, arithmetic;
    tchi_newton_plan best;
    double error, cost;
} search;

/* Keeps the cheaper plan or, at equal cost, the more accurate one. */
static void keep_cheaper(search *s, tchi_newton_plan *plan, double error)
{
    tchi_newton_choose_types(plan, s->rates, s->low, s->arithmetic);
    double cost = tchi_newton_cost(plan, s->rates), same = 1e-9 * s->cost;
    if (cost < s->cost - same || (cost < s->cost + same && error < s->error)) {
        s->best = *plan;
        s->error = error;
        s->cost = cost;
    }
}

/* With the shorter final polynomial if it is accurate enough, else with the longer one. Returns whether either is. */
static bool consider_ending(search *s, const tchi_newton_plan *plan)
{
    double error;
    const tchi_minimax_step *last = &plan->step[plan->steps - 1];
    tchi_newton_plan ended = ended_at(plan, plan->steps, &plan->ending);
    if (tchi_minimax_ending(plan->root, last->lo, last->hi, &ended.ending, &error) != 0 || error > s->tolerance) {
        ended.ends = 6;
        if (tchi_minimax_longer_ending(plan->root, last->lo, last->hi, &ended.longer, &error) != 0 ||
            error > s->tolerance) {
            return false;
        }
    }
    keep_cheaper(s, &ended, error);
    return true;
}

/* Adds a step of degree 4 if one exists and leaves room for a final polynomial. */
static bool add_steep(tchi_newton_plan *plan)
{
    const tchi_minimax_step *last = &plan->step[plan->steps - 1];
    if (plan->steps + 2 > TCHI_MINIMAX_MAX_STEPS ||
        tchi_minimax_polynomial(plan->root, 4, last->lo, last->hi, &plan->step[plan->steps]) != 0) {
        return false;
    }
    plan->steps++;
    return true;
}

/* The first step always has degree 2: M has its full condition number there, and a steeper H would amplify its rounding
 * error. Later steps may have degree 4, and then so have all that follow: other orders save nothing. */
bool tchi_newton_steepen(tchi_newton_plan *plan, const tch_product_rates *rates, double low, double tolerance,
                         double arithmetic)
{
    search s = {rates, low, tolerance, arithmetic, *plan, 0.0, tchi_newton_cost(plan, rates)};
    tchi_newton_plan flat = {.root = plan->root, .degree = 2};
    int most = tchi_minimax_plan(plan->root, 2, low, tolerance, flat.step);
    bool ended = plan->root == 1; /* whose steps have hardly more products than a final polynomial */
    for (int k = 1; k <= most && k < TCHI_MINIMAX_MAX_STEPS && !ended; k++) {
        tchi_newton_plan tried = flat;
        tried.steps = k;
        ended = consider_ending(&s, &tried);
        bool done = ended;
        while (!done && add_steep(&tried)) {
            done = consider_ending(&s, &tried);
        }
    }
    *plan = s.best;
    return s.error > 0.0;
}

tch_scalar tchi_newton_type_of_m(const tchi_newton_plan *plan, int k)
{
    return k == 0 && plan->congruent[k] ? TCH_SCALAR_F64 : plan->type[k];
}

/* --- the iteration ---------------------------------------------------------------------------------------------- */

/* Buffers by role; roles are exchanged by swapping pointers. Congruent steps use two of them for a factor of M and its
 * product with K, and keep everything but M in the halves of the other two. */
typedef struct cast {
    tch_matrices *m, *x, *h, *s, *t;
    tch_matrices *product, *factor;
    tch_matrices halves[4];
    int32_t *flags;
} cast;

static tch_matrices half_of(const tch_matrices *wide, int which)
{
    tch_matrices half = *wide;
    half.type = TCH_SCALAR_BF16X2;
    half.data = (char *)wide->data + which * (wide->batch * wide->stride * tchi_scalar_size(half.type));
    return half;
}

static void assign_buffers(const tchi_newton_plan *plan, tchi_newton_buffers *b, cast *c)
{
    *c = (cast){.m = &b->m[0], .x = &b->m[1], .h = &b->m[2], .s = &b->m[3], .t = &b->m[4]};
    c->product = &b->m[1];
    c->factor = &b->m[2];
    if (plan->steps > 0 && plan->congruent[0]) {
        for (int i = 0; i < 4; i++) {
            c->halves[i] = half_of(&b->m[3 + i / 2], i % 2);
        }
        c->x = &c->halves[0];
        c->h = &c->halves[1];
        c->s = &c->halves[2];
        c->t = &c->halves[3];
    }
}

static void swap_matrices(tch_matrices **a, tch_matrices **b)
{
    tch_matrices *c = *a;
    *a = *b;
    *b = c;
}

static tch_status multiply_symmetric(tch_context *context, const tch_matrices *a, const tch_matrices *b,
                                     tch_scalar type, tch_matrices *c)
{
    c->type = type;
    return tchi_symmetric_product(context, a, b, c);
}

static tch_status convert_matrices(tch_context *context, const tch_matrices *from, tch_scalar type, tch_matrices *to)
{
    to->type = type;
    return context->backend->matrix->shift_scale(context->state, from, NULL, NULL, 1.0, to);
}

/* S = s0 I + s1 M + M^2, then t0 I + t1 M + t2 S^2. */
static tch_status evaluate_quartic(tch_context *context, const tchi_minimax_quartic *q, const tch_matrices *m,
                                   tch_matrices *s, tch_matrices *out)
{
    s->type = out->type = m->type;
    TCHI_TRY(tchi_symmetric_polynomial(context, q->s0, q->s1, m, 1.0, m, m, s));
    return tchi_symmetric_polynomial(context, q->t0, q->t1, m, q->t2, s, s, out);
}

/* H = c0 I + c1 M + c2 M^2, or with two more terms, which use S. */
static tch_status evaluate_h(tch_context *context, int degree, const tchi_minimax_step *step, const tch_matrices *m,
                             tch_matrices *s, tch_matrices *h)
{
    h->type = m->type;
    if (is_steep(step)) {
        tchi_minimax_quartic q = tchi_minimax_quartic_of(step->c);
        return evaluate_quartic(context, &q, m, s, h);
    }
    if (degree == 2) {
        return tchi_symmetric_polynomial(context, step->c[0], step->c[1], m, step->c[2], m, m, h);
    }
    return context->backend->matrix->combine(context->state, step->c[0], step->c[1], m, 0.0, NULL, h);
}

/* H^root into *power: H itself, S or T. */
static tch_status raise_h(tch_context *context, int32_t root, cast *c, tch_matrices **power)
{
    tch_scalar type = c->h->type;
    *power = c->h;
    if (root == 1) {
        return TCH_OK;
    }
    TCHI_TRY(multiply_symmetric(context, c->h, c->h, type, c->s));
    *power = c->s;
    if (root == 2) {
        return TCH_OK;
    }
    /* T = H^3 for roots 3 and 6, H^4 for roots 4 and 8. */
    TCHI_TRY(multiply_symmetric(context, c->s, root % 3 == 0 ? c->h : c->s, type, c->t));
    *power = c->t;
    if (root == 3 || root == 4) {
        return TCH_OK;
    }
    TCHI_TRY(multiply_symmetric(context, c->t, c->t, type, c->s));
    *power = c->s;
    return TCH_OK;
}

/* M <- H^root M, into a free buffer. */
static tch_status update_m(tch_context *context, int32_t root, tch_scalar next, cast *c)
{
    tch_matrices *power;
    TCHI_TRY(raise_h(context, root, c, &power));
    tch_matrices **target = power == c->s ? &c->t : &c->s;
    TCHI_TRY(multiply_symmetric(context, power, c->m, next, *target));
    swap_matrices(&c->m, target);
    return TCH_OK;
}

/* The first X is H itself, swapped in after H's last use; only a change of type copies it. */
static tch_status first_x(tch_context *context, tch_scalar next, cast *c)
{
    if (c->h->type == next) {
        swap_matrices(&c->x, &c->h);
        return TCH_OK;
    }
    return convert_matrices(context, c->h, next, c->x);
}

/* Two float16 per number, accurate to 22 bits: in either half of M's buffer, which has the size of float64. */
static tch_status split_in_m(tch_context *context, const tch_matrices *x, const cast *c, int which,
                             tch_split_matrices *planes)
{
    int64_t bytes = c->m->batch * c->m->stride * tchi_scalar_size(TCH_SCALAR_F16);
    planes->high = planes->low = *c->m;
    planes->high.type = planes->low.type = TCH_SCALAR_F16;
    planes->high.data = (char *)c->m->data + 2 * which * bytes;
    planes->low.data = (char *)planes->high.data + bytes;
    return tchi_split(context, x, TCHI_SPLIT_UNIT, planes);
}

/* C = K L for lower triangular L, by column blocks, without the part above them. */
static tch_status multiply_lower(tch_context *context, const tch_split_matrices *k, const tch_split_matrices *l,
                                 const tch_matrices *c)
{
    int64_t n = c->rows;
    for (int64_t first = 0; first < n; first += TCH_CHOLESKY_BLOCK) {
        int64_t left = n - first;
        int64_t cols = tchi_min(TCH_CHOLESKY_BLOCK, left);
        tch_split_matrices a = {tchi_matrices_block(&k->high, 0, first, n, left),
                                tchi_matrices_block(&k->low, 0, first, n, left), k->scale};
        tch_split_matrices b = {tchi_matrices_block(&l->high, first, first, left, cols),
                                tchi_matrices_block(&l->low, first, first, left, cols), l->scale};
        tch_matrices out = tchi_matrices_block(c, 0, first, n, cols);
        const tch_split_problem product = {.alpha = 1.0, .a = &a, .b = &b, .low = TCH_LOW_BOTH, .c = &out};
        TCHI_TRY(tchi_split_product(context, &product));
    }
    return TCH_OK;
}

/* K = H^(root/2) in float64, for an even root. */
static tch_status evaluate_k(tch_context *context, int32_t root, cast *c, tch_matrices *k)
{
    if (root == 2) {
        return convert_matrices(context, c->h, TCH_SCALAR_F64, k);
    }
    if (root == 4) {
        return multiply_symmetric(context, c->h, c->h, TCH_SCALAR_F64, k);
    }
    TCHI_TRY(multiply_symmetric(context, c->h, c->h, c->h->type, c->s));
    return multiply_symmetric(context, c->s, root == 6 ? c->h : c->s, TCH_SCALAR_F64, k);
}

/* The product becomes K L with M = L L', after which M is free. The rounding error of L, whose smallest directions are
 * the smallest of all, matters more than that of later factors: with two bfloat16 residuals would be up to 1.7 times as
 * large. So L is two float16, or float64 if that is as fast. */
static tch_status first_factor(tch_context *context, int32_t root, cast *c)
{
    const tch_matrix_ops *t = context->backend->matrix;
    tch_split_matrices k;
    tch_split_matrices l;
    c->factor->type = c->product->type = TCH_SCALAR_F64;
    TCHI_TRY(t->cholesky(context->state, c->m, 0, c->factor, c->flags, c->product->data));
    if (c->m->rows <= TCH_CHOLESKY_BLOCK) {
        TCHI_TRY(evaluate_k(context, root, c, c->m));
        return t->gemm(context->state, 1.0, c->m, 0, c->factor, 0, 0.0, 0, c->product);
    }
    TCHI_TRY(evaluate_k(context, root, c, c->product));
    TCHI_TRY(split_in_m(context, c->product, c, 0, &k));
    TCHI_TRY(split_in_m(context, c->factor, c, 1, &l));
    c->product->type = TCH_SCALAR_F32;
    return multiply_lower(context, &k, &l, c->product);
}

/* The two bfloat16 planes of the split type. */
static tch_split_matrices planes_of(const tch_matrices *m)
{
    tch_split_matrices planes = {*m, *m, 1.0};
    planes.high.type = planes.low.type = TCH_SCALAR_BF16;
    planes.high.stride = planes.low.stride = 2 * m->stride;
    planes.low.data = (char *)m->data + m->stride * tchi_scalar_size(TCH_SCALAR_BF16);
    return planes;
}

/* The product becomes K T. */
static tch_status next_factor(tch_context *context, int32_t root, cast *c)
{
    tch_matrices *k;
    TCHI_TRY(raise_h(context, root / 2, c, &k));
    tch_split_matrices left = planes_of(k);
    tch_split_matrices right = planes_of(c->factor);
    c->product->type = TCH_SCALAR_F32;
    const tch_split_problem product = {.alpha = 1.0, .a = &left, .b = &right, .low = TCH_LOW_BOTH, .c = c->product};
    return tchi_split_product(context, &product);
}

/* M <- K M K = T T', and T, the factor, <- K T. */
static tch_status update_factor_and_m(tch_context *context, int32_t root, bool first, tch_scalar next, cast *c)
{
    TCHI_TRY(first ? first_factor(context, root, c) : next_factor(context, root, c));
    TCHI_TRY(convert_matrices(context, c->product, c->h->type, c->factor));
    c->m->type = next;
    return tchi_gram(context, 1.0, c->factor, 0, 0.0, c->m);
}

static tch_status run_congruent_step(tch_context *context, const tchi_newton_plan *p, int k, cast *c)
{
    tch_scalar next = p->type[k + 1]; /* a congruent step is never the last */
    if (k == 0) {
        TCHI_TRY(convert_matrices(context, c->m, p->type[k], c->t));
    }
    TCHI_TRY(evaluate_h(context, p->degree, &p->step[k], k == 0 ? c->t : c->m, c->s, c->h));
    if (k > 0) {
        TCHI_TRY(multiply_symmetric(context, c->x, c->h, next, c->s));
        swap_matrices(&c->x, &c->s);
    }
    TCHI_TRY(update_factor_and_m(context, p->root, k == 0, next, c));
    return k == 0 ? first_x(context, next, c) : TCH_OK;
}

/* A last step of degree 1, without H: X <- X (c0 I + c1 M). */
static tch_status run_short_last_step(tch_context *context, const tchi_minimax_step *step, cast *c)
{
    c->t->type = c->x->type;
    TCHI_TRY(tchi_symmetric_polynomial(context, 0.0, step->c[0], c->x, step->c[1], c->x, c->m, c->t));
    swap_matrices(&c->x, &c->t);
    return TCH_OK;
}

/* S = s0 I + s1 M + M^2 and U = u0 I + u1 M + S^2, in H and T, then t0 I + t1 M + t2 S U. */
static tch_status evaluate_sextic(tch_context *context, const tchi_minimax_sextic *q, cast *c, tch_matrices *out)
{
    c->h->type = c->t->type = out->type = c->m->type;
    TCHI_TRY(tchi_symmetric_polynomial(context, q->s0, q->s1, c->m, 1.0, c->m, c->m, c->h));
    TCHI_TRY(tchi_symmetric_polynomial(context, q->u0, q->u1, c->m, 1.0, c->h, c->h, c->t));
    return tchi_symmetric_polynomial(context, q->t0, q->t1, c->m, q->t2, c->h, c->t, out);
}

/* X <- X q(M). */
static tch_status run_ending(tch_context *context, const tchi_newton_plan *p, cast *c)
{
    TCHI_TRY(p->ends == 4 ? evaluate_quartic(context, &p->ending, c->m, c->h, c->s)
                          : evaluate_sextic(context, &p->longer, c, c->s));
    TCHI_TRY(multiply_symmetric(context, c->x, c->s, c->x->type, c->t));
    swap_matrices(&c->x, &c->t);
    return TCH_OK;
}

static tch_status run_step(tch_context *context, const tchi_newton_plan *p, int k, cast *c)
{
    if (p->congruent[k]) {
        return run_congruent_step(context, p, k, c);
    }
    const tchi_minimax_step *step = &p->step[k];
    bool last = k + 1 == p->steps;
    if (last && p->ends) {
        return run_ending(context, p, c);
    }
    tch_scalar next = last ? p->type[k] : p->type[k + 1];
    if (last && step->c[2] == 0.0 && k > 0) {
        return run_short_last_step(context, step, c);
    }
    TCHI_TRY(evaluate_h(context, p->degree, step, c->m, c->s, c->h));
    if (k > 0) {
        TCHI_TRY(multiply_symmetric(context, c->x, c->h, next, c->t));
        swap_matrices(&c->x, &c->t);
    }
    if (!last) {
        TCHI_TRY(update_m(context, p->root, next, c));
    }
    return k == 0 ? first_x(context, next, c) : TCH_OK;
}

static const char *range_name(const tchi_newton_plan *plan, int k)
{
    if (plan->congruent[k]) {
        return "newton step, congruent";
    }
    switch (plan->type[k]) {
    case TCH_SCALAR_F64:
        return "newton step, float64";
    case TCH_SCALAR_F32:
        return "newton step, float32";
    default:
        return "newton step, split bfloat16";
    }
}

tch_status tchi_newton(tch_context *context, const tchi_newton_plan *plan, tchi_newton_buffers *b, int32_t *flags,
                       tch_matrices *result)
{
    cast c;
    assign_buffers(plan, b, &c);
    c.flags = flags;
    if (plan->steps == 0) {
        TCHI_TRY(context->backend->matrix->combine(context->state, 1.0, 0.0, NULL, 0.0, NULL, c.x));
    }
    for (int k = 0; k < plan->steps; k++) {
        tchi_range_push(context, range_name(plan, k));
        tch_status status = run_step(context, plan, k, &c);
        tchi_range_pop(context);
        TCHI_TRY(status);
    }
    *result = *c.x;
    return TCH_OK;
}
