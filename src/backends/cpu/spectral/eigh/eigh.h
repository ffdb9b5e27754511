/* Eigenvalues and eigenvectors of one dense symmetric matrix, the CPU backend's own solver. Inside a parallel region
 * a call stays on its thread, so a batch is a parallel loop over its matrices; outside, a call uses every thread. */
#ifndef TCHI_CPU_EIGH_H
#define TCHI_CPU_EIGH_H

#include <stddef.h>
#include <stdint.h>

#include "backends/cpu/runtime/blas/blas.h"

/* What is returned besides 0. A positive value is the number of eigenvalues that did not converge. */
enum { TCHI_EIGH_NOT_FINITE = -1 };

/* Bytes of scratch that the solver needs for an n by n matrix. The pointer given later is aligned to 64 bytes. */
size_t tchi_cpu_eigh_scratch_f32(int64_t n);
size_t tchi_cpu_eigh_scratch_f64(int64_t n);

/* Reads the lower triangle of a column by column (which is the upper triangle of a row-major matrix); leading dimension
 * lda >= n. On return w holds the eigenvalues, ascending, and column i of a (row i, read row-major) the unit
 * eigenvector of w[i]. Returns 0; TCHI_EIGH_NOT_FINITE with a and w untouched when the triangle read holds an infinity
 * or a NaN; a positive value when the iteration failed, and then a and w hold nothing useful. */
int tchi_cpu_eigh_f32(const tchi_blas_f32 *blas, int64_t n, float *a, int64_t lda, float *w, void *scratch);
int tchi_cpu_eigh_f64(const tchi_blas_f64 *blas, int64_t n, double *a, int64_t lda, double *w, void *scratch);

#endif
