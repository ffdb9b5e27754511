/* The coupled Newton iteration for inverse roots, with minimax steps: products only. */
#ifndef TCHI_NEWTON_H
#define TCHI_NEWTON_H

#include "core/context.h"
#include "core/tensor.h"

#include "minimax.h"

#define TCHI_NEWTON_BUFFERS 5

/* All that the iteration does, decided before it starts. Every step has the type it is computed in: its products read
 * and write that type, except the last X and M of a step, which come out in the type of the next.
 *
 * Steps are of degree 1 or 2, and the later ones of a plan of degree 2 may be of degree 4. The last step may be an
 * ending: X q(M) with a polynomial of degree 4 or 6, after which M is of no use.
 *
 * In a congruent step M becomes K M K with K = H^(root/2). Whatever rounding K has, that cannot disturb M's small
 * eigenvalues by more than a like fraction of themselves; computing it from M would need float64. But these steps keep
 * a T with M = T T', which becomes K T: it has only the root of M's condition number, and split products are enough for
 * it. The first T is K L with Cholesky's L, which is what float64 is left with; of small matrices K L is, too. */
typedef struct tchi_newton_plan {
    int32_t root;
    int degree, steps;
    tchi_minimax_step step[TCHI_MINIMAX_MAX_STEPS];
    tch_scalar type[TCHI_MINIMAX_MAX_STEPS];
    bool congruent[TCHI_MINIMAX_MAX_STEPS];
    int ends; /* the degree of the last step if it is an ending, 4 or 6, which has no coefficients in step[]; or 0 */
    tchi_minimax_quartic ending;
    tchi_minimax_sextic longer;
} tchi_newton_plan;

/* The symmetric products of its steps, each over the rate of its type, for types that were chosen. */
double tchi_newton_cost(const tchi_newton_plan *plan, const tch_product_rates *rates);

/* The type M is in before step k. */
tch_scalar tchi_newton_type_of_m(const tchi_newton_plan *plan, int k);

/* Scratch of the iteration: batches of equal shape, each with room for the widest type of the plan. On entry buffer 0
 * holds M, a scaled matrix with spectrum in (0, 1], in the type of the first step's M; tchi_newton leaves M^(-1/root)
 * in *result, somewhere in the buffers, in the type of the last step. What Cholesky finds not to be positive definite
 * is flagged, TCH_REPORT_NOT_POSITIVE, and its result undefined. */
typedef struct tchi_newton_buffers {
    tch_matrices m[TCHI_NEWTON_BUFFERS];
} tchi_newton_buffers;

tch_status tchi_newton(tch_context *context, const tchi_newton_plan *plan, tchi_newton_buffers *buffers, int32_t *flags,
                       tch_matrices *result);

/* Makes the last of several steps one of degree 1, which saves a product, where that too brings X within `tolerance`.
 * Returns whether it did. */
bool tchi_newton_shorten(tchi_newton_plan *plan, double tolerance);

/* Puts an ending in place of the last steps, as many as it can do the work of within `tolerance`, or shortens the last
 * where that takes no more products. */
void tchi_newton_end(tchi_newton_plan *plan, double tolerance);

/* Looks for a plan that costs less, to the same `tolerance` and from the same `low`, with steps of degree 2 and then
 * of degree 4. The plan given has its types chosen for the tolerance `arithmetic`, and so has the one it leaves.
 * Returns whether it found one. */
bool tchi_newton_steepen(tchi_newton_plan *plan, const tch_product_rates *rates, double low, double tolerance,
                         double arithmetic);

/* Chooses the kind of every step from what the arithmetic costs and how much of its rounding the step magnifies, for an
 * error of `tolerance` in X and a first M with spectrum in [low, 1]. */
void tchi_newton_choose_types(tchi_newton_plan *plan, const tch_product_rates *rates, double low, double tolerance);

#endif
