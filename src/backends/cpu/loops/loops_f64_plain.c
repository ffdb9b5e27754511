/* The float64 loops, for any processor: the reference. */
#define REAL double
#include "loops_body.h"

const tchi_loops tchi_loops_f64_plain = LOOPS_TABLE;
