/* X = sum over j of w_j (A + s_j I)^(-1) for a symmetric positive semidefinite A and positive weights and shifts: the
 * partial-fraction form of a rational approximation of A^(-1/p). A is reduced once to a band, so that further poles
 * cost little; bench/ladder/shifted_inverse.md tells the story and the figures. */
#ifndef TCHI_CPU_SHIFTED_INVERSE_H
#define TCHI_CPU_SHIFTED_INVERSE_H

#include <stddef.h>
#include <stdint.h>

#include "backends/cpu/runtime/blas/blas.h"

/* Bytes of scratch for one call; the pointer given must be aligned to 64 bytes. */
size_t tchi_cpu_shifted_inverse_scratch_f32(int64_t n, int64_t count);
size_t tchi_cpu_shifted_inverse_scratch_f64(int64_t n, int64_t count);

/* a is n by n with both triangles given, leading dimension lda >= n, and is DESTROYED. x receives the full result,
 * exactly symmetric, leading dimension ldx >= n; it must not overlap a. count >= 1.
 * Returns 0; or k > 0 when A + shifts[k-1] I is not positive definite to working precision; or -1 when a holds a NaN
 * or an infinity. x is undefined unless 0 is returned. Runs on one thread when called inside a parallel region. */
int tchi_cpu_shifted_inverse_f32(const tchi_blas *blas, int64_t n, float *a, int64_t lda, int64_t count,
                                 const double *shifts, const double *weights, float *x, int64_t ldx, void *scratch);
int tchi_cpu_shifted_inverse_f64(const tchi_blas *blas, int64_t n, double *a, int64_t lda, int64_t count,
                                 const double *shifts, const double *weights, double *x, int64_t ldx, void *scratch);

/* The same by one Cholesky inversion per pole, in double precision throughout: plain and slow, what tests compare
 * with. a is kept. The scratch is for either precision. */
size_t tchi_cpu_shifted_inverse_reference_scratch(int64_t n);
int tchi_cpu_shifted_inverse_reference_f32(const tchi_blas *blas, int64_t n, const float *a, int64_t lda, int64_t count,
                                           const double *shifts, const double *weights, float *x, int64_t ldx,
                                           void *scratch);
int tchi_cpu_shifted_inverse_reference_f64(const tchi_blas *blas, int64_t n, const double *a, int64_t lda,
                                           int64_t count, const double *shifts, const double *weights, double *x,
                                           int64_t ldx, void *scratch);

#endif
