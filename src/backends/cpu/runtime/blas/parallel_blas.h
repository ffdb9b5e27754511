/* BLAS and LAPACK on one large row-major matrix with all threads of a state. OpenBLAS built with OpenMP shares the
 * library's threads: it is called once and divides the work itself. Otherwise each thread calls it for its part of the
 * result. Inside a parallel region, and for small matrices, there is a single call. */
#ifndef TCHI_CPU_PARALLEL_BLAS_H
#define TCHI_CPU_PARALLEL_BLAS_H

#include "backends/cpu/cpu.h"

/* Pointers are to elements of one precision. */
typedef struct tchi_parallel_blas {
    /* C = alpha op(A) op(B) + beta C, C being m by n. */
    void (*gemm)(const tchi_cpu_state *state, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, double alpha,
                 const void *a, int64_t lda, const void *b, int64_t ldb, double beta, void *c, int64_t ldc);
    /* The lower triangle of C = alpha op(A) op(A)' + beta C. */
    void (*syrk)(const tchi_cpu_state *state, int trans, int64_t n, int64_t k, double alpha, const void *a, int64_t lda,
                 double beta, void *c, int64_t ldc);
    /* The lower triangle of C = A B, which is symmetric; the part above it is overwritten in part. */
    void (*symm)(const tchi_cpu_state *state, int64_t n, const void *a, int64_t lda, const void *b, int64_t ldb,
                 void *c, int64_t ldc);
    /* A = L L', with L overwriting the lower triangle. Returns LAPACK's info: 0, or the order of the first minor that
     * is not positive. */
    int (*potrf)(const tchi_cpu_state *state, int64_t n, void *a, int64_t lda);
    /* B = L^-1 B, or L'^-1 B, B being n by columns. */
    void (*trsm)(const tchi_cpu_state *state, int trans, int64_t n, int64_t columns, const void *l, int64_t ldl,
                 void *b, int64_t ldb);
    /* X = L^-1, where X holds a copy of L with zeros above its diagonal. Returns LAPACK's info. */
    int (*trtri)(const tchi_cpu_state *state, int64_t n, const void *l, int64_t ldl, void *x, int64_t ldx);
} tchi_parallel_blas;

extern const tchi_parallel_blas tchi_parallel_blas_f32, tchi_parallel_blas_f64;

static inline const tchi_parallel_blas *tchi_parallel_blas_for(tch_scalar type)
{
    return type == TCH_SCALAR_F64 ? &tchi_parallel_blas_f64 : &tchi_parallel_blas_f32;
}

#endif
