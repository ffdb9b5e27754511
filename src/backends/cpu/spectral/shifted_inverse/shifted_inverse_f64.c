/* The shifted inverse for float64; the algorithm is in shifted_inverse_body.h. */
#include "shifted_inverse.h"

#include <float.h>

#define REAL double
#define REAL_BLAS tchi_blas_f64
#define REAL_FIELD f64
#define REAL_ABS fabs
#define REAL_SQRT sqrt
#define REAL_HYPOT hypot
#define REAL_EPSILON DBL_EPSILON
#define REAL_SMALLEST DBL_MIN
#define REAL_LARGEST DBL_MAX
#include "shifted_inverse_body.h"

const tchi_cpu_shifted_inverse_solver tchi_cpu_shifted_inverse_f64 = {shifted_inverse_scratch_bytes,
                                                                      solve_shifted_inverse};
