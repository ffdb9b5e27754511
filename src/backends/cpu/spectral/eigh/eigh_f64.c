/* The symmetric eigensolver in double precision. What the numbers mean is said in eigh_f32.c. */
#define REAL double
#define REAL_BLAS tchi_blas_f64
#define ROUND_OFF 0x1p-53
#define SMALLEST_SQUARES 0x1p-900
#define MAX_SCALING 1022
#define LEAF_TOLERANCE 0x1p-52
#define SECULAR_TOLERANCE 0x1p-46
#include "eigh_body.h"

size_t tchi_cpu_eigh_scratch_f64(int64_t n)
{
    return eigh_scratch(n);
}

int tchi_cpu_eigh_f64(const tchi_blas_f64 *blas, int64_t n, double *a, int64_t lda, double *w, void *scratch)
{
    return eigh(blas, n, a, lda, w, scratch);
}
