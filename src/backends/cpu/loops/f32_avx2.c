/* The loops in float32, and the conversions, for AVX2. */
#include "f32_body.h"

const tchi_loops tchi_loops_f32_avx2 = LOOPS_TABLE;
const tchi_cpu_steps tchi_cpu_steps_f32_avx2 = STEPS_TABLE;
const tchi_conversions tchi_conversions_avx2 = CONVERSIONS_TABLE;
