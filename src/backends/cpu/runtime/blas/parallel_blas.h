/* BLAS and LAPACK on one large matrix, row by row in memory, with all threads of a state. An OpenBLAS built with
 * OpenMP shares our threads: it is called once and divides the work itself. Any other is called by each of our threads
 * on its part of the result. Inside a parallel region, and for small matrices, it is always one call. */
#ifndef TCHI_CPU_PARALLEL_BLAS_H
#define TCHI_CPU_PARALLEL_BLAS_H

#include "backends/cpu/cpu.h"

/* C = alpha op(A) op(B) + beta C, C being m by n. */
void tchi_cpu_gemm_f32(const tchi_cpu_state *state, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                       float alpha, const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                       int64_t ldc);
void tchi_cpu_gemm_f64(const tchi_cpu_state *state, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                       double alpha, const double *a, int64_t lda, const double *b, int64_t ldb, double beta, double *c,
                       int64_t ldc);

/* The lower triangle of C = alpha op(A) op(A)' + beta C. */
void tchi_cpu_syrk_f32(const tchi_cpu_state *state, int trans, int64_t n, int64_t k, float alpha, const float *a,
                       int64_t lda, float beta, float *c, int64_t ldc);
void tchi_cpu_syrk_f64(const tchi_cpu_state *state, int trans, int64_t n, int64_t k, double alpha, const double *a,
                       int64_t lda, double beta, double *c, int64_t ldc);

/* The lower triangle of C = A B, which is known to be symmetric. What is above it is written too, in part. */
void tchi_cpu_symm_f32(const tchi_cpu_state *state, int64_t n, const float *a, int64_t lda, const float *b, int64_t ldb,
                       float *c, int64_t ldc);
void tchi_cpu_symm_f64(const tchi_cpu_state *state, int64_t n, const double *a, int64_t lda, const double *b,
                       int64_t ldb, double *c, int64_t ldc);

/* A = L L', with L in place of the lower triangle. Returns LAPACK's info: 0, or which minor is not positive. */
int tchi_cpu_potrf_f32(const tchi_cpu_state *state, int64_t n, float *a, int64_t lda);
int tchi_cpu_potrf_f64(const tchi_cpu_state *state, int64_t n, double *a, int64_t lda);

/* B = L^-1 B, or L'^-1 B, B being n by columns. */
void tchi_cpu_trsm_f32(const tchi_cpu_state *state, int trans, int64_t n, int64_t columns, const float *l, int64_t ldl,
                       float *b, int64_t ldb);
void tchi_cpu_trsm_f64(const tchi_cpu_state *state, int trans, int64_t n, int64_t columns, const double *l, int64_t ldl,
                       double *b, int64_t ldb);

/* X = L^-1, where X holds a copy of L with zeros above its diagonal. Returns LAPACK's info. */
int tchi_cpu_trtri_f32(const tchi_cpu_state *state, int64_t n, const float *l, int64_t ldl, float *x, int64_t ldx);
int tchi_cpu_trtri_f64(const tchi_cpu_state *state, int64_t n, const double *l, int64_t ldl, double *x, int64_t ldx);

#endif
