/* Coefficients for inverse p-th roots that do not depend on the matrix: the best polynomial steps of the coupled
 * iteration, and the best sums of poles for x^(-1/p). Everything is scalar double arithmetic without allocation or
 * state; docs/numerics/minimax.md has the derivations and tables. */
#ifndef TCHI_MINIMAX_H
#define TCHI_MINIMAX_H

enum { TCHI_MINIMAX_MAX_ROOT = 16, TCHI_MINIMAX_MAX_STEPS = 40, TCHI_MINIMAX_MAX_POLES = 24 };

/* Wider intervals (lo/hi below this) are errors: the smallest values of a step would be rounding error. */
#define TCHI_MINIMAX_LEAST_RATIO 1e-15

/* One step of the coupled iteration: H = c[0] I + c[1] M + ... + c[4] M^4, X <- X H, M <- H^p M. [lo, hi] contains the
 * spectrum of M after the step; lo + hi = 2 up to rounding. Eigenvalues of M above the interval of a step are amplified
 * or change sign, so the first M must be scaled by a true upper bound. */
typedef struct tchi_minimax_step {
    double c[5];
    double lo, hi;
} tchi_minimax_step;

/* The q of this degree (1, 2 or 4) with the least maximum of |1 - x q(x)^root| over [lo, hi]. q is positive there.
 * `root` is 1 to TCHI_MINIMAX_MAX_ROOT, 0 < lo < hi, lo/hi at least TCHI_MINIMAX_LEAST_RATIO, and between 1e-9 and 0.8
 * for degree 4, whose coefficients would be rounding error outside. Returns 0, or -1 for arguments outside these
 * ranges; inside them the exchange always converges. */
int tchi_minimax_polynomial(int root, int degree, double lo, double hi, tchi_minimax_step *step);

/* A polynomial of degree 4 in two products: s = s0 + s1 x + x^2, then t0 + t1 x + t2 s^2. */
typedef struct tchi_minimax_quartic {
    double s0, s1, t0, t1, t2;
} tchi_minimax_quartic;

/* The polynomial with coefficients c[0] to c[4]; c[4] is not 0. */
tchi_minimax_quartic tchi_minimax_quartic_of(const double *c);

/* Interpolates x^(-1/root) at the Chebyshev points of [lo, hi]; the largest |q(x) x^(1/root) - 1| there. `root` is 1 to
 * TCHI_MINIMAX_MAX_ROOT, 0 < lo < hi. Returns 0, or -1 for arguments outside these ranges and for intervals so narrow
 * that the coefficients would be rounding error. */
int tchi_minimax_ending(int root, double lo, double hi, tchi_minimax_quartic *q, double *error);

/* A polynomial of degree 6 in three products: s = s0 + s1 x + x^2, u = u0 + u1 x + s^2, then t0 + t1 x + t2 s u. */
typedef struct tchi_minimax_sextic {
    double s0, s1, u0, u1, t0, t1, t2;
} tchi_minimax_sextic;

/* The one with the least maximum of |q(x) x^(1/root) - 1| over [lo, hi], which is stored in *error. `root` is 1 to
 * TCHI_MINIMAX_MAX_ROOT, lo/hi between 1e-3 and 0.75. Returns 0, or -1 for arguments outside these ranges. */
int tchi_minimax_longer_ending(int root, double lo, double hi, tchi_minimax_sextic *q, double *error);

/* All steps for a spectrum in [lo, 1], until X is within `tolerance` of the root: the relative error of X on an
 * eigenvalue whose M is now m is exactly |m^(1/root) - 1|, so the last step satisfies max(hi^(1/root) - 1, 1 -
 * lo^(1/root)) <= tolerance. Tolerances are clamped to at least 1e-15. Returns the number of steps (0 if X = I is
 * accurate enough), or -1 for arguments out of range. */
int tchi_minimax_plan(int root, int degree, double lo, double tolerance, tchi_minimax_step *steps);

/* x^(-1/root) = sum over j of weights[j] / (x + shifts[j]) on [lo, 1], with the least maximal relative error among sums
 * of that many poles, and the fewest poles whose error is at most `tolerance`. Weights and shifts are positive, shifts
 * increase; root 1 is the single exact pole at 0. `shifts` and `weights` hold TCHI_MINIMAX_MAX_POLES values. *error is
 * the measured largest relative error of the result. It exceeds `tolerance` only if the pole limit or rounding, near
 * 1e-15, is reached; the best sum found is returned then. TCHI_MINIMAX_LEAST_RATIO <= lo < 1; lo is clamped to 0.99,
 * tolerances to [1e-15, 1/2]. Returns the number of poles, or -1 for arguments out of range or if Newton's method
 * fails, which did not happen in 200,000 random requests. Takes from microseconds for one pole to half a millisecond
 * for 24. */
int tchi_minimax_poles(int root, double lo, double tolerance, double *shifts, double *weights, double *error);

#endif
