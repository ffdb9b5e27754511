/* The shifted inverse for float64; the algorithm is in shifted_inverse_body.h. */
#include "shifted_inverse.h"

#include <float.h>

#define REAL double
#define REAL_BLAS tchi_blas_f64
#define REAL_ABS fabs
#define REAL_SQRT sqrt
#define REAL_HYPOT hypot
#define REAL_EPSILON DBL_EPSILON
#define REAL_SMALLEST DBL_MIN
#define REAL_LARGEST DBL_MAX
#include "shifted_inverse_body.h"

size_t tchi_cpu_shifted_inverse_scratch_f64(int64_t n, int64_t count)
{
    return shifted_inverse_scratch(n, count);
}

int tchi_cpu_shifted_inverse_f64(const tchi_blas *blas, int64_t n, double *a, int64_t lda, int64_t count,
                                 const double *shifts, const double *weights, double *x, int64_t ldx, void *scratch)
{
    return shifted_inverse(blas, &blas->f64, n, a, lda, count, shifts, weights, x, ldx, scratch);
}

int tchi_cpu_shifted_inverse_reference_f64(const tchi_blas *blas, int64_t n, const double *a, int64_t lda,
                                           int64_t count, const double *shifts, const double *weights, double *x,
                                           int64_t ldx, void *scratch)
{
    return shifted_inverse_reference(blas, n, a, lda, count, shifts, weights, x, ldx, scratch);
}

size_t tchi_cpu_shifted_inverse_reference_scratch(int64_t n)
{
    return 2 * sizeof(double) * (size_t)(n * n);
}
