/* The symmetric eigensolver in single precision. */
#define REAL float
#define REAL_BLAS tchi_blas_f32
#define ROUND_OFF 0x1p-24
#define SMALLEST_SQUARES 0x1p-100f
#define LEAF_TOLERANCE 0x1p-32
#define SECULAR_TOLERANCE 0x1p-24
#include "eigh_body.h"

size_t tchi_cpu_eigh_scratch_f32(int64_t n)
{
    return eigh_scratch(n);
}

int tchi_cpu_eigh_f32(const tchi_blas_f32 *blas, int64_t n, float *a, int64_t lda, float *w, void *scratch)
{
    return eigh(blas, n, a, lda, w, scratch);
}
