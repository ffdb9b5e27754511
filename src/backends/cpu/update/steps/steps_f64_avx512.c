/* The optimizers' float64 loops for AVX-512. */
#define REAL double
#define REAL_SQRT sqrt
#include "steps_body.h"

const tchi_cpu_steps tchi_cpu_steps_f64_avx512 = STEPS_TABLE;
