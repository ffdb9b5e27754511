/* The shifted inverse for float32; the algorithm is in shifted_inverse_body.h. */
#include "shifted_inverse.h"

#include <float.h>

#define REAL float
#define REAL_BLAS tchi_blas_f32
#define REAL_FIELD f32
#define REAL_ABS fabsf
#define REAL_SQRT sqrtf
#define REAL_HYPOT hypotf
#define REAL_EPSILON FLT_EPSILON
#define REAL_SMALLEST FLT_MIN
#define REAL_LARGEST FLT_MAX
#include "shifted_inverse_body.h"

const tchi_cpu_shifted_inverse_solver tchi_cpu_shifted_inverse_f32 = {shifted_inverse_scratch_bytes,
                                                                      solve_shifted_inverse};
