/* The optimizers' float32 loops for AVX2. */
#define REAL float
#define REAL_SQRT sqrtf
#include "steps_body.h"

const tchi_cpu_steps tchi_cpu_steps_f32_avx2 = STEPS_TABLE;
