/* The float32 loops for AVX-512. */
#define REAL float
#define REAL_ABS fabsf
#include "loops_body.h"

const tchi_loops tchi_loops_f32_avx512 = LOOPS_TABLE;
