/* The Newton-Schulz iteration. A step only needs the Gram matrix M = X X': with P = a I + b M + c M^2 the new X is P X
 * and its Gram matrix is P M P. So for long X several steps run on M alone, accumulated in Q, followed by one product X
 * <- Q X.
 *
 * Rounding gives M an error relative to its largest eigenvalue, which every step on M multiplies by a^2 where
 * eigenvalues are small, whereas a Gram matrix recomputed from X has almost no negative eigenvalues. Runs of steps on
 * one M are therefore short; they are longer with M in float16, which has eight times the precision of bfloat16:
 * docs/numerics/orthogonalization.md. */
#include "orthogonalize.h"

#include <math.h>
#include <stdbool.h>

#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "batch.h"

/* --- coefficients ------------------------------------------------------------------------------------------------ */

/* Muon's coefficients; and Polar Express's, each optimal for the result of the previous steps, the last one repeated.
 * Its authors divide all but the last by a safety factor, so that rounding cannot push a singular value out of
 * range. */
static const tchi_schulz_step muon = {3.4445, -4.7750, 2.0315};
static const tchi_schulz_step polar_express[] = {
    {8.2872, -23.5959, 17.3004}, {4.1071, -2.9478, 0.5448}, {3.9487, -2.9089, 0.5518},
    {3.3184, -2.4885, 0.5100},   {2.3007, -1.6689, 0.4188}, {1.875, -1.25, 0.375},
};
#define POLAR_SETS ((int32_t)(sizeof polar_express / sizeof polar_express[0]))
#define SAFETY 1.01

static tchi_schulz_step polar_step(int32_t k)
{
    if (k >= POLAR_SETS - 1) {
        return polar_express[POLAR_SETS - 1];
    }
    tchi_schulz_step c = polar_express[k];
    double s = SAFETY;
    return (tchi_schulz_step){c.a / s, c.b / (s * s * s), c.c / (s * s * s * s * s)};
}

/* A step of higher degree, for singular values up to `top`. With Y = X X' / top^2,
 *
 *     U = Y^2 + u1 Y + u0,   F = U^2 + f1 Y + f0,   X <- (t2 F^2 + t0) X / top
 *
 * has degree 17 for three products, and without F, X <- (t2 U^2 + t1 Y + t0) X / top, degree 9 for two. */
typedef struct long_step {
    int32_t degree;
    double top;
    double u0, u1, f0, f1, t0, t1, t2;
} long_step;

/* Three steps that bring singular values in [0.001, 1] within 0.104 of 1, with a margin of 1.5 % of error between them:
 * for each form the smallest maximum distance from 1 that a search found, given the range after the previous step. */
static const long_step minimax[] = {
    {17, 1.0, 0.1741972, -1.073597, -0.008994106, 0.004077704, 0.274108, 0.0, 60242.94},
    {17, 2.00185, 0.1917662, -1.103001, -0.01043446, 0.006585975, 1.025102, 0.0, 30596.31},
    {9, 1.71889, 0.3180031, -1.235464, 0.0, 0.0, 1.9062, -1.078413, 40.38145},
};
#define LONG_STEPS ((int32_t)(sizeof minimax / sizeof minimax[0]))

tchi_ortho tchi_ortho_of(tch_ortho_method method, int32_t steps, double eps)
{
    if (method == TCH_ORTHO_MUON) {
        return tchi_ortho_repeating(muon, steps, eps);
    }
    tchi_ortho ortho = {.eps = eps, .steps = steps};
    if (method == TCH_ORTHO_MINIMAX) {
        ortho.longs = steps < LONG_STEPS ? steps : LONG_STEPS;
    }
    for (int32_t k = 0; k < steps; k++) {
        ortho.step[k] = ortho.longs > 0 ? polar_express[POLAR_SETS - 1] : polar_step(k);
    }
    return ortho;
}

int32_t tchi_ortho_usual_steps(tch_ortho_method method)
{
    return method == TCH_ORTHO_MINIMAX ? LONG_STEPS : 5;
}

/* Long steps subtract nearly equal numbers, for which bfloat16 has too few bits: if M would be bfloat16, uses steps of
 * Polar Express that end as close to 1. */
static tchi_ortho without_long_steps(const tchi_ortho *ortho)
{
    return tchi_ortho_of(TCH_ORTHO_POLAR_EXPRESS, ortho->steps + TCHI_ORTHO_MORE, ortho->eps);
}

tchi_ortho tchi_ortho_repeating(tchi_schulz_step step, int32_t steps, double eps)
{
    tchi_ortho ortho = {.eps = eps, .steps = steps};
    for (int32_t k = 0; k < steps; k++) {
        ortho.step[k] = step;
    }
    return ortho;
}

/* bfloat16 if the device multiplies it: the steps pull singular values towards 1 in spite of rounding, and an optimizer
 * needs no more. float64 stays float64. */
tch_scalar tchi_ortho_type(const tch_context *context, tch_scalar type)
{
    bool in_bf16 = type != TCH_SCALAR_F64 && tchi_product_rates(context).bf16 > 0;
    return in_bf16 ? TCH_SCALAR_BF16 : tchi_compute_type(type);
}

/* --- the plan ---------------------------------------------------------------------------------------------------- */

/* The factor by which a run may let the error of M grow. In bfloat16, with matrices such as rank one plus noise, 12
 * (two steps of Muon, the last two of Polar Express's five) gives the same singular values as a new M at every step, if
 * the first step is separate; 16 (Polar Express's second and third) may diverge. */
#define MOST_GROWTH 12.5

/* The same for M in float16 and at least 64 rows: 17 (Polar Express's second and third) gives singular values as close
 * to the exact ones as the runs above in bfloat16; 64 (four steps with a = 2) at most 0.03 above them; 165 (the last
 * three of Polar Express's five) up to 0.3 above. */
#define MOST_GROWTH_FINE 100.0

/* The time of a symmetric product relative to a full one. Extending a run by a step costs three symmetric products of
 * M; a new run costs a symmetric and a full product of X instead. On one CPU core in float32 runs took 4 % longer for
 * 256 by 384 and 20 % less for 256 by 704. In bfloat16 an H200 reached 613 TFLOP/s on symmetric products and, in other
 * runs, 725 to 789 on full ones: about 0.65 in large batches and more in small ones. With that ratio runs would begin
 * at 1.2 times as many columns as rows instead of 1.5 and save 3 to 6 % of the products' time in between; one value for
 * all devices is kept. */
#define HALF_COST 1.0

/* The first step of the run that ends before step `end`. X is always multiplied after the very first step, which moves
 * the singular values most. */
static int32_t run_start(const tchi_ortho *ortho, int32_t end, bool fine)
{
    double growth = 1.0;
    int32_t first = end - 1;
    while (first > 1 && first > ortho->longs) {
        double a = ortho->step[first - 1].a;
        growth *= fmax(a * a, 1.0);
        if (!(growth <= (fine ? MOST_GROWTH_FINE : MOST_GROWTH))) {
            break;
        }
        first--;
    }
    return first;
}

/* Runs are laid out backwards from the last step, each as long as possible. */
int32_t tchi_ortho_run(const tchi_ortho *ortho, int32_t step, int64_t rows, int64_t cols, bool fine)
{
    bool runs_pay = (1.0 + HALF_COST) * (double)cols > 3.0 * HALF_COST * (double)rows;
    if (step < ortho->longs || !runs_pay) {
        return 1;
    }
    int32_t end = ortho->steps;
    int32_t first = run_start(ortho, end, fine);
    while (first > step) {
        end = first;
        first = run_start(ortho, end, fine);
    }
    return end - step;
}

/* In the longer of the two plans, which covers the shorter one. */
static bool has_runs(const tchi_ortho *ortho, int64_t rows, int64_t cols)
{
    for (int32_t k = 0; k < ortho->steps; k++) {
        if (tchi_ortho_run(ortho, k, rows, cols, true) > 1) {
            return true;
        }
    }
    return false;
}

/* --- scratch ----------------------------------------------------------------------------------------------------- */

/* M is no longer needed when Y is computed: if both are square they share memory, and swap it with X, unless there are
 * long steps, which store F in Y. P of a run, and the intermediates of its products, are in Y if that is long enough
 * for both. */
typedef struct schulz_buffers {
    tch_matrices y;       /* as x */
    tch_matrices m, p, q; /* rows by rows; p is empty if it is stored in y */
    bool shared;          /* m with y */
    double *scale;        /* of `normalize` */
} schulz_buffers;

/* The row stride of a square matrix in y, a multiple of 16 bytes. */
static int64_t square_ld(const tch_matrices *x)
{
    return (x->rows + 7) / 8 * 8;
}

static void layout(schulz_buffers *s, tchi_arena *arena, const tchi_ortho *ortho, const tch_matrices *x)
{
    tchi_ortho plan = ortho->longs > 0 ? without_long_steps(ortho) : *ortho; /* it has at least as many runs */
    bool runs = has_runs(&plan, x->rows, x->cols);
    int64_t for_p = runs && x->cols < 2 * square_ld(x) ? x->batch : 0; /* otherwise P fits into y */
    s->shared = !runs && ortho->longs == 0 && x->rows == x->cols;
    s->y = tchi_scratch_aligned(arena, x->type, x->batch, x->rows, x->cols);
    s->m = s->shared ? s->y : tchi_scratch_aligned(arena, x->type, x->batch, x->rows, x->rows);
    s->q = tchi_scratch_aligned(arena, x->type, x->batch, x->rows, x->rows);
    s->p = tchi_scratch_aligned(arena, x->type, for_p, x->rows, x->rows);
    s->scale = tchi_arena_take(arena, TCH_NORMALIZE_NUMBERS * x->batch * (int64_t)sizeof *s->scale);
}

int64_t tchi_orthogonalize_bytes(const tchi_ortho *ortho, const tch_matrices *x)
{
    schulz_buffers probe;
    tchi_arena arena = {0};
    layout(&probe, &arena, ortho, x);
    return arena.used;
}

/* --- the iteration ----------------------------------------------------------------------------------------------- */

/* Arithmetic of a run's products. M is stored multiplied by `unit`, so that float16 keeps the small numbers of flat
 * spectra. */
typedef struct schulz_arithmetic {
    const double *scale; /* the norm's reciprocal, if the division is deferred to the products; or NULL */
    int32_t pending;     /* X has yet to be multiplied by it */
    tch_scalar type;     /* of M and P, if there are several steps */
    double unit;
} schulz_arithmetic;

/* The largest float16 is 65504. M has no entries above 1.5, and its largest product, P M, at most twice that. */
#define FINE_UNIT 256.0

/* c0 I + c1 D + c2 A B, times scale^exponent while the division is pending. */
static tch_status scaled_product(tch_context *context, const schulz_arithmetic *how, double c0, double c1,
                                 const tch_matrices *d, double c2, const tch_matrices *a, const tch_matrices *b,
                                 int32_t exponent, const tch_matrices *c)
{
    if (how->scale != NULL) {
        return context->backend->matrix->symmetric_product(context->state, c0, c1, d, c2, a, b, how->scale,
                                                           how->pending ? exponent : 0, c);
    }
    return tchi_symmetric_polynomial(context, c0, c1, d, c2, a, b, c);
}

static tch_status gram_matrix(tch_context *context, const schulz_arithmetic *how, double factor, const tch_matrices *x,
                              const tch_matrices *m)
{
    if (how->scale != NULL) {
        return scaled_product(context, how, 0.0, 0.0, NULL, factor * how->unit, x, x, 2, m);
    }
    return tchi_gram(context, factor, x, 0, 0.0, m);
}

static tch_status polynomial(tch_context *context, const schulz_arithmetic *how, tchi_schulz_step c,
                             const tch_matrices *m, int32_t exponent, const tch_matrices *p)
{
    double unit = how->unit;
    return scaled_product(context, how, c.a, c.b / unit, m, c.c / (unit * unit), m, m, exponent, p);
}

static tch_status commuting_product(tch_context *context, const schulz_arithmetic *how, const tch_matrices *a,
                                    const tch_matrices *b, int32_t exponent, const tch_matrices *c)
{
    return scaled_product(context, how, 0.0, 0.0, NULL, 1.0, a, b, exponent, c);
}

static void swap_matrices(tch_matrices *a, tch_matrices *b)
{
    tch_matrices c = *a;
    *a = *b;
    *b = c;
}

static tch_matrices typed(tch_matrices m, tch_scalar type)
{
    m.type = type;
    return m;
}

/* The first or second square matrix in each matrix of y. */
static tch_matrices square_in_y(const schulz_buffers *s, int number, tch_scalar type)
{
    tch_matrices square = typed(s->y, type);
    square.cols = square.rows;
    square.ld =
        square_ld(&s->y) < s->y.ld ? square_ld(&s->y) : s->y.ld; /* rows of y may be shorter than aligned ones */
    square.data = (char *)s->y.data + number * square.rows * square.ld * tchi_scalar_size(s->y.type);
    return square;
}

/* Steps 1 to count - 1 of a run on M in m; step 0 left its P in q. The product of all P is returned in `result`, which
 * is m's memory in X's type: q and a fourth batch alternate. The fourth is in y, which is free until X is multiplied,
 * and wide enough. */
static tch_status accumulate_polynomials(tch_context *context, const schulz_arithmetic *how,
                                         const tchi_schulz_step *step, int32_t count, const schulz_buffers *s,
                                         tch_matrices q, const tch_matrices *result)
{
    tch_matrices m = typed(s->m, how->type);
    tch_matrices p = s->p.batch > 0 ? typed(s->p, how->type) : square_in_y(s, 1, how->type);
    tch_matrices spare = square_in_y(s, 0, how->type);
    for (int32_t k = 1; k < count; k++) {
        const tch_matrices *before = k == 1 ? &q : &p; /* M <- P M P */
        TCHI_TRY(commuting_product(context, how, before, &m, 0, &spare));
        TCHI_TRY(commuting_product(context, how, &spare, before, 0, &m));
        TCHI_TRY(polynomial(context, how, step[k], &m, 0, &p));
        bool last = k + 1 == count;
        TCHI_TRY(commuting_product(context, how, &p, &q, last ? 1 : 0, last ? result : &spare));
        swap_matrices(&q, &spare);
    }
    return TCH_OK;
}

/* `count` steps on one Gram matrix: from x to y. */
static tch_status run_steps(tch_context *context, const schulz_arithmetic *how, const tchi_schulz_step *step,
                            int32_t count, const tch_matrices *x, const schulz_buffers *s)
{
    tch_matrices m = typed(s->m, how->type);
    tch_matrices q = typed(s->q, how->type);
    TCHI_TRY(gram_matrix(context, how, 1.0, x, &m));
    TCHI_TRY(polynomial(context, how, step[0], &m, count == 1 ? 1 : 0, &q));
    if (count > 1) {
        TCHI_TRY(accumulate_polynomials(context, how, step, count, s, q, &s->m));
    }
    return context->backend->matrix->gemm(context->state, 1.0, count == 1 ? &q : &s->m, 0, x, 0, 0.0, 0, &s->y);
}

/* unit (A^2 / unit^2 + c1 D / unit + c0 I), where A, D and the result are stored multiplied by `unit`. */
static tch_status square_polynomial(tch_context *context, const schulz_arithmetic *how, double c0, double c1,
                                    const tch_matrices *d, const tch_matrices *a, const tch_matrices *c)
{
    return scaled_product(context, how, how->unit * c0, c1, d, 1.0 / how->unit, a, a, 0, c);
}

/* From x to y. Y is in m; U and F, or U alone, in q and in a square of y; the last product, of X's type, in q. */
static tch_status run_long_step(tch_context *context, const schulz_arithmetic *how, const long_step *step,
                                const tch_matrices *x, const schulz_buffers *s)
{
    double unit = how->unit;
    tch_matrices m = typed(s->m, how->type);
    tch_matrices q = typed(s->q, how->type);
    tch_matrices spare = square_in_y(s, 0, how->type);
    bool is_long = step->degree == 17;
    TCHI_TRY(gram_matrix(context, how, 1.0 / (step->top * step->top), x, &m));
    TCHI_TRY(square_polynomial(context, how, step->u0, step->u1, &m, &m, is_long ? &q : &spare));
    if (is_long) {
        TCHI_TRY(square_polynomial(context, how, step->f0, step->f1, &m, &q, &spare));
    }
    TCHI_TRY(scaled_product(context, how, step->t0 / step->top, step->t1 / (unit * step->top), is_long ? NULL : &m,
                            step->t2 / (unit * unit * step->top), &spare, &spare, 1, &s->q));
    return context->backend->matrix->gemm(context->state, 1.0, &s->q, 0, x, 0, 0.0, 0, &s->y);
}

tch_status tchi_orthogonalize_blocks(tch_context *context, const tchi_ortho *ortho, const tch_matrices *x, int64_t all,
                                     void *scratch, tch_matrices *result)
{
    int32_t deferred;
    schulz_buffers s;
    tchi_arena arena = {.base = scratch};
    layout(&s, &arena, ortho, x);
    *result = *x;
    TCHI_TRY(context->backend->matrix->normalize(context->state, ortho->eps, x, all, s.scale, &deferred));
    bool fine = deferred && !ortho->without_f16;
    tchi_ortho plan = ortho->longs > 0 && !fine && tchi_scalar_size(x->type) == 2 ? without_long_steps(ortho) : *ortho;
    for (int32_t k = 0; k < plan.steps;) {
        int32_t count = tchi_ortho_run(&plan, k, x->rows, x->cols, fine);
        bool short_m = fine && (k < plan.longs || count > 1);
        schulz_arithmetic how = {deferred ? s.scale : NULL, k == 0, short_m ? TCH_SCALAR_F16 : x->type,
                                 short_m ? FINE_UNIT : 1.0};
        TCHI_TRY(k < plan.longs ? run_long_step(context, &how, minimax + k, result, &s)
                                : run_steps(context, &how, plan.step + k, count, result, &s));
        swap_matrices(result, &s.y);
        s.m = s.shared ? s.y : s.m;
        k += count;
    }
    return TCH_OK;
}

/* --- the public call ---------------------------------------------------------------------------------------------- */

/* Reads a part of the caller's batch, transposed if that makes X X' smaller. */
static tch_matrices layout_part(tchi_arena *arena, const tchi_batch *a, const tchi_ortho *ortho, tch_scalar type,
                                int64_t count, void **scratch)
{
    tch_matrices x = tchi_scratch_aligned(arena, type, count, a->rows, a->cols);
    *scratch = tchi_arena_take(arena, tchi_orthogonalize_bytes(ortho, &x));
    return x;
}

static tch_status ortho_part(tch_context *context, const tchi_batch *a, const tchi_batch *out, const tchi_ortho *ortho,
                             int64_t first, int64_t count)
{
    void *scratch;
    tchi_arena arena = {0};
    tch_scalar type = tchi_ortho_type(context, a->type);
    (void)layout_part(&arena, a, ortho, type, count, &scratch);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    tch_matrices x = layout_part(&arena, a, ortho, type, count, &scratch);
    tch_matrices result;
    TCHI_TRY(tchi_batch_read(context, a, first, &x));
    TCHI_TRY(tchi_orthogonalize_blocks(context, ortho, &x, a->count, scratch, &result));
    return tchi_batch_write(context, out, first, &result);
}

static tch_status check_call(tch_context *context, const tch_tensor *a, int32_t steps, tch_ortho_method method,
                             const tch_tensor *out)
{
    TCHI_TRY(tchi_check_matrices(context, a, "a"));
    TCHI_TRY(tchi_check_output_like(context, out, "out", a, "a"));
    TCHI_TRY(tchi_check_disjoint(out, "out", a, "a"));
    if (steps < 1 || steps > TCHI_ORTHO_MOST_STEPS) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "steps is %d, expected 1 to %d", steps, TCHI_ORTHO_MOST_STEPS);
    }
    if (method < TCH_ORTHO_POLAR_EXPRESS || method > TCH_ORTHO_MINIMAX) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "method is %d, expected one of tch_ortho_method", (int)method);
    }
    return TCH_OK;
}

tch_status tch_orthogonalize(tch_context *context, const tch_tensor *a, int32_t steps, tch_ortho_method method,
                             tch_tensor *out)
{
    TCHI_ENTER(context, "tch_orthogonalize");
    TCHI_TRY(check_call(context, a, steps, method, out));
    tchi_batch from = tchi_batch_of(a, 2);
    tchi_batch to = tchi_batch_of(out, 2);
    if (from.rows == 0 || from.cols == 0) {
        return TCH_OK;
    }
    if (from.rows > from.cols) {
        from = tchi_batch_transposed(from);
        to = tchi_batch_transposed(to);
    }
    tch_scalar type = tchi_ortho_type(context, from.type);
    /* Only prevents a division of zero matrices by zero; any other norm is at least the smallest number of its type. */
    double smallest_norm = type == TCH_SCALAR_F64 ? 0x1p-1074 : 0x1p-200;
    tchi_ortho ortho = tchi_ortho_of(method, steps, smallest_norm);
    void *scratch;
    tchi_arena one = {0};
    (void)layout_part(&one, &from, &ortho, type, 1, &scratch);
    int64_t chunk = tchi_arena_fit(context, from.count, one.used, 0);
    for (int64_t first = 0; first < from.count; first += chunk) {
        int64_t count = from.count - first < chunk ? from.count - first : chunk;
        TCHI_TRY(ortho_part(context, &from, &to, &ortho, first, count));
    }
    return TCH_OK;
}
