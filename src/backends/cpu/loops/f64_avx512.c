/* The loops in float64 for AVX-512. */
#include "f64_body.h"

const tchi_loops tchi_loops_f64_avx512 = LOOPS_TABLE;
const tchi_cpu_steps tchi_cpu_steps_f64_avx512 = STEPS_TABLE;
