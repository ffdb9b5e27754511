/* Eigensolver for one dense symmetric matrix. Inside a parallel region a call stays on its thread, so a batch is a
 * parallel loop; outside, a call uses all threads. */
#ifndef TCHI_CPU_EIGH_H
#define TCHI_CPU_EIGH_H

#include <stddef.h>
#include <stdint.h>

#include "backends/cpu/runtime/blas/blas.h"

/* Return codes besides 0. A positive value is the number of eigenvalues that did not converge. */
enum { TCHI_EIGH_NOT_FINITE = -1 };

/* The solver in one precision. */
typedef struct tchi_cpu_eigh_solver {
    /* Bytes of scratch for an n by n matrix. The pointer given later is aligned to 64 bytes. */
    size_t (*scratch_bytes)(int64_t n);
    /* Reads the lower triangle of a column by column (which is the upper triangle of a row-major matrix); leading
     * dimension lda >= n. On return w holds the eigenvalues, ascending, and column i of a (row i, read row-major) the
     * unit eigenvector of w[i]. Returns 0; TCHI_EIGH_NOT_FINITE with a and w untouched when the triangle read holds an
     * infinity or a NaN; a positive value when the iteration failed, and then a and w are undefined. */
    int (*solve)(const tchi_blas *blas, int64_t n, void *a, int64_t lda, void *w, void *scratch);
} tchi_cpu_eigh_solver;

extern const tchi_cpu_eigh_solver tchi_cpu_eigh_f32, tchi_cpu_eigh_f64;

#endif
