/* The float64 loops, for any processor: the reference. */
#define REAL double
#define REAL_ABS fabs
#include "loops_body.h"

const tchi_loops tchi_loops_f64_plain = LOOPS_TABLE;
