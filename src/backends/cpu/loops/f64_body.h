/* Everything in float64 for one instruction set. */
#define REAL double
#define REAL_ABS fabs
#define REAL_SQRT sqrt
#include "loops_body.h"

#include "backends/cpu/update/steps/steps_body.h"
