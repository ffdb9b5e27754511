/* The loops in float64 for AVX2. */
#include "f64_body.h"

const tchi_loops tchi_loops_f64_avx2 = LOOPS_TABLE;
const tchi_cpu_steps tchi_cpu_steps_f64_avx2 = STEPS_TABLE;
