/* X = sum over j of w_j (A + s_j I)^(-1) for a symmetric positive semidefinite A and positive weights and shifts: a
 * rational approximation of A^(-1/p) in partial fractions. A is reduced once to a band, so that further poles are
 * cheap; figures in bench/logs/shifted_inverse.md. */
#ifndef TCHI_CPU_SHIFTED_INVERSE_H
#define TCHI_CPU_SHIFTED_INVERSE_H

#include <stddef.h>
#include <stdint.h>

#include "backends/cpu/runtime/blas/blas.h"

/* The solver in one precision. */
typedef struct tchi_cpu_shifted_inverse_solver {
    /* Bytes of scratch for one call; the pointer given must be aligned to 64 bytes. */
    size_t (*scratch_bytes)(int64_t n, int64_t count);
    /* a is n by n with both triangles given, leading dimension lda >= n, and is DESTROYED. x receives the full result,
     * exactly symmetric, leading dimension ldx >= n; it must not overlap a. count >= 1.
     * Returns 0; or k > 0 when A + shifts[k-1] I is not positive definite to working precision; or -1 when a holds a
     * NaN or an infinity. x is undefined unless 0 is returned. Runs on one thread when called inside a parallel
     * region. */
    int (*solve)(const tchi_blas *blas, int64_t n, void *a, int64_t lda, int64_t count, const double *shifts,
                 const double *weights, void *x, int64_t ldx, void *scratch);
} tchi_cpu_shifted_inverse_solver;

extern const tchi_cpu_shifted_inverse_solver tchi_cpu_shifted_inverse_f32, tchi_cpu_shifted_inverse_f64;

#endif
