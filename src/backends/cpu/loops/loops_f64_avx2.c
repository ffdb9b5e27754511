/* The float64 loops for AVX2. */
#define REAL double
#define REAL_ABS fabs
#include "loops_body.h"

const tchi_loops tchi_loops_f64_avx2 = LOOPS_TABLE;
