/* The shifted inverse for float32; the algorithm is in shifted_inverse_body.h. */
#include "shifted_inverse.h"

#include <float.h>

#define REAL float
#define REAL_BLAS tchi_blas_f32
#define REAL_ABS fabsf
#define REAL_SQRT sqrtf
#define REAL_HYPOT hypotf
#define REAL_EPSILON FLT_EPSILON
#define REAL_SMALLEST FLT_MIN
#define REAL_LARGEST FLT_MAX
#include "shifted_inverse_body.h"

size_t tchi_cpu_shifted_inverse_scratch_f32(int64_t n, int64_t count)
{
    return shifted_inverse_scratch(n, count);
}

int tchi_cpu_shifted_inverse_f32(const tchi_blas *blas, int64_t n, float *a, int64_t lda, int64_t count,
                                 const double *shifts, const double *weights, float *x, int64_t ldx, void *scratch)
{
    return shifted_inverse(blas, &blas->f32, n, a, lda, count, shifts, weights, x, ldx, scratch);
}

int tchi_cpu_shifted_inverse_reference_f32(const tchi_blas *blas, int64_t n, const float *a, int64_t lda, int64_t count,
                                           const double *shifts, const double *weights, float *x, int64_t ldx,
                                           void *scratch)
{
    return shifted_inverse_reference(blas, n, a, lda, count, shifts, weights, x, ldx, scratch);
}
