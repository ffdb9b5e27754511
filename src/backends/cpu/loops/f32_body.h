/* Everything in float32 for one instruction set. */
#define REAL float
#define REAL_ABS fabsf
#define REAL_SQRT sqrtf
#include "convert_body.h"
#include "loops_body.h"

#include "backends/cpu/update/steps/steps_body.h"
