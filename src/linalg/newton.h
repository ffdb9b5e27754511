/* The coupled Newton iteration for inverse roots, with minimax steps; products only. */
#ifndef TCHI_NEWTON_H
#define TCHI_NEWTON_H

#include "core/context.h"
#include "core/tensor.h"

#include "minimax.h"

#define TCHI_NEWTON_BUFFERS 5

/* A plan, made before the iteration starts. Every step has its own type: its products read and write that type, except
 * that the last X and M of a step are written in the type of the next.
 *
 * Steps have degree 1 or 2, and the later ones of a plan of degree 2 may have degree 4. The last step may be a final
 * polynomial: X q(M) of degree 4 or 6, after which M is not needed.
 *
 * In a congruent step M becomes K M K with K = H^(root/2): rounding error in K perturbs M's small eigenvalues only by
 * the same relative amount. Computing this from M would need float64. But these steps keep T with M = T T', which
 * becomes K T; T has only the square root of M's condition number, so split products suffice. The first T is K L with
 * the Cholesky factor L, the remaining float64 work; for small matrices K L is float64, too. */
typedef struct tchi_newton_plan {
    int32_t root;
    int degree, steps;
    tchi_minimax_step step[TCHI_MINIMAX_MAX_STEPS];
    tch_scalar type[TCHI_MINIMAX_MAX_STEPS];
    bool congruent[TCHI_MINIMAX_MAX_STEPS];
    int ends; /* degree of the final polynomial, 4 or 6, which has no coefficients in step[]; or 0 */
    tchi_minimax_quartic ending;
    tchi_minimax_sextic longer;
} tchi_newton_plan;

/* The symmetric products of all steps, each divided by the throughput of its type; types must be chosen. */
double tchi_newton_cost(const tchi_newton_plan *plan, const tch_product_rates *rates);

/* The type of M before step k. */
tch_scalar tchi_newton_type_of_m(const tchi_newton_plan *plan, int k);

/* Scratch of the iteration: batches of equal shape, each with room for the largest type of the plan. On entry buffer 0
 * holds M, a scaled matrix with spectrum in (0, 1], in the type of the first step's M. tchi_newton leaves M^(-1/root)
 * in *result, one of the buffers, in the type of the last step. If Cholesky finds a matrix not positive definite, it is
 * flagged TCH_REPORT_NOT_POSITIVE and its result is undefined. */
typedef struct tchi_newton_buffers {
    tch_matrices m[TCHI_NEWTON_BUFFERS];
} tchi_newton_buffers;

tch_status tchi_newton(tch_context *context, const tchi_newton_plan *plan, tchi_newton_buffers *buffers, int32_t *flags,
                       tch_matrices *result);

/* Reduces the last of several steps to degree 1, which saves a product, if X stays within `tolerance`. Returns whether
 * it did. */
bool tchi_newton_shorten(tchi_newton_plan *plan, double tolerance);

/* Replaces the last steps by a final polynomial, as many as it can within `tolerance`, or shortens the last one if that
 * needs no more products. */
void tchi_newton_end(tchi_newton_plan *plan, double tolerance);

/* Searches for a cheaper plan for the same `tolerance` and `low`, with steps of degree 2 and then of degree 4. The
 * types of the given plan and of the result are chosen for the tolerance `arithmetic`. Returns whether it found one. */
bool tchi_newton_steepen(tchi_newton_plan *plan, const tch_product_rates *rates, double low, double tolerance,
                         double arithmetic);

/* Chooses the type of every step from the throughput of the arithmetic and how much the step amplifies its rounding
 * error, for an error of `tolerance` in X and a first M with spectrum in [low, 1]. */
void tchi_newton_choose_types(tchi_newton_plan *plan, const tch_product_rates *rates, double low, double tolerance);

#endif
