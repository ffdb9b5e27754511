/* The optimizers' float32 loops for AVX-512. */
#define REAL float
#define REAL_SQRT sqrtf
#include "steps_body.h"

const tchi_cpu_steps tchi_cpu_steps_f32_avx512 = STEPS_TABLE;
