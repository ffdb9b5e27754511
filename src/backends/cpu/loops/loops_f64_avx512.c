/* The float64 loops for AVX-512. */
#define REAL double
#define REAL_ABS fabs
#include "loops_body.h"

const tchi_loops tchi_loops_f64_avx512 = LOOPS_TABLE;
