/* The float32 loops, for any processor: the reference. */
#define REAL float
#define REAL_ABS fabsf
#include "loops_body.h"

const tchi_loops tchi_loops_f32_plain = LOOPS_TABLE;
