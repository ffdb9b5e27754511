/* Plain float64 references on row-major arrays: the shortest correct code, written independently of the library. */
#ifndef TORCHIUM_TESTS_REFERENCE_H
#define TORCHIUM_TESTS_REFERENCE_H

#include <stdint.h>

#include "support/elements.h"
#include "support/random.h"

/* c = a b, a being m by k and b k by n; the _abs form sums |a| |b|, which bounds the rounding errors of a product. */
void ref_matmul(int64_t m, int64_t k, int64_t n, const double *a, const double *b, double *c);
void ref_matmul_abs(int64_t m, int64_t k, int64_t n, const double *a, const double *b, double *c);

/* Fails unless each of `count` sums is within its rounding error: `terms` roundings of the compute type, relative to
 * the sums of absolute values, and one of the result's dtype. */
void ref_check_sums(const double *got, const double *expected, const double *magnitude, int64_t count, int64_t terms,
                    tch_dtype dtype);

/* b (n by m) = the transpose of a (m by n). */
void ref_transpose(int64_t m, int64_t n, const double *a, double *b);

/* out (m p by n q) = a (m by n) Kronecker b (p by q). */
void ref_kronecker(int64_t m, int64_t n, const double *a, int64_t p, int64_t q, const double *b, double *out);

/* Eigenvalues w, ascending, and eigenvectors, the columns of v, of symmetric a, by cyclic Jacobi rotations. */
void ref_eigh(int64_t n, const double *a, double *w, double *v);

/* out = v diag(f) v'. */
void ref_compose(int64_t n, const double *v, const double *f, double *out);

/* v diag((w + shift)^power) v', in the test's memory: a power of the matrix with this decomposition. */
double *ref_power(int64_t n, const double *w, const double *v, double shift, double power);

double ref_trace(int64_t n, const double *a);

/* |x^ceil(p/2) (a + shift I) x^floor(p/2) - I|_F / sqrt(n): the balanced residual of an inverse p-th root. */
double ref_root_residual(int64_t n, int32_t root, const double *a, double shift, const double *x);

double ref_norm(int64_t count, const double *x);
double ref_distance(int64_t count, const double *x, const double *y);
double ref_largest(int64_t count, const double *x);

/* A symmetric matrix with eigenvalues w and random eigenvectors (a product of random reflections). */
void ref_symmetric(test_random *random, int64_t n, const double *w, double *a);

/* A geometric sequence w from 1 down to 1/condition. n = 1 gives 1. */
void ref_spectrum(int64_t n, double condition, double *w);

/* x = a x + b (x x') x + c (x x')^2 x for x n by m, c being {a, b, c}. */
void ref_schulz_step(int64_t n, int64_t m, const double c[3], double *x);

/* --- minimax steps of orthogonalization -------------------------------------------------------------------------- */

/* Steps 0 to 2 of TCH_ORTHO_MINIMAX on X, n by m, in place, and their slopes at 0. */
#define REF_LONG_STEPS 3
double ref_long_slope(int number);
void ref_long_step(int number, int64_t n, int64_t m, double *x);

#endif
