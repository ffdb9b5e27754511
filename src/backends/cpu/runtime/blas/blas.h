/* The dense kernels used from OpenBLAS (BLAS through its C interface, LAPACK through Fortran's), as one table per
 * precision with the same field names, so that code written against `tchi_blas_f32` compiles unchanged against
 * `tchi_blas_f64`. The library is opened at run time, see blas.c. */
#ifndef TCHI_CPU_BLAS_H
#define TCHI_CPU_BLAS_H

#include <stddef.h>

enum { TCHI_ROW_MAJOR = 101, TCHI_COL_MAJOR = 102 };
enum { TCHI_NO_TRANS = 111, TCHI_TRANS = 112 };
enum { TCHI_UPPER = 121, TCHI_LOWER = 122 };
enum { TCHI_NON_UNIT = 131, TCHI_UNIT = 132 };
enum { TCHI_LEFT = 141, TCHI_RIGHT = 142 };

/* Fortran routines take every argument by address, matrices in column-major order, and the length of each character
 * argument after all others. */
typedef struct tchi_blas_f32 {
    void (*gemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc);
    void (*syrk)(int order, int uplo, int trans, int n, int k, float alpha, const float *a, int lda, float beta,
                 float *c, int ldc);
    void (*trsm)(int order, int side, int uplo, int trans, int diag, int m, int n, float alpha, const float *a, int lda,
                 float *b, int ldb);
    void (*potrf)(const char *uplo, const int *n, float *a, const int *lda, int *info, size_t);
    void (*trtri)(const char *uplo, const char *diag, const int *n, float *a, const int *lda, int *info, size_t,
                  size_t);
} tchi_blas_f32;

typedef struct tchi_blas_f64 {
    void (*gemm)(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda,
                 const double *b, int ldb, double beta, double *c, int ldc);
    void (*syrk)(int order, int uplo, int trans, int n, int k, double alpha, const double *a, int lda, double beta,
                 double *c, int ldc);
    void (*trsm)(int order, int side, int uplo, int trans, int diag, int m, int n, double alpha, const double *a,
                 int lda, double *b, int ldb);
    void (*potrf)(const char *uplo, const int *n, double *a, const int *lda, int *info, size_t);
    void (*trtri)(const char *uplo, const char *diag, const int *n, double *a, const int *lda, int *info, size_t,
                  size_t);
} tchi_blas_f64;

/* How the opened library uses threads. */
typedef enum tchi_blas_threading {
    TCHI_BLAS_SEQUENTIAL = 0,
    TCHI_BLAS_PTHREADS = 1, /* limited to one thread: see parallel_blas.h */
    TCHI_BLAS_OPENMP = 2,   /* shares the library's pool; inside parallel regions its calls stay on one thread */
} tchi_blas_threading;

typedef struct tchi_blas {
    tchi_blas_f32 f32;
    tchi_blas_f64 f64;
    tchi_blas_threading threading;
    char library[512];  /* the opened file */
    const char *origin; /* how it was found */
    char version[32];
    char core[32];         /* its kernels: its name for the processor */
    char note[256];        /* what was changed or is advised, or empty */
    char passed_over[400]; /* an earlier file that is unusable, with the reason, or empty */
} tchi_blas;

/* The table, opened once; NULL with *reason set if no library can be used. Thread-safe. */
const tchi_blas *tchi_blas_open(const char **reason);

#endif
