/* The optimizers' float32 loops for any processor: the reference. */
#define REAL float
#define REAL_SQRT sqrtf
#include "steps_body.h"

const tchi_cpu_steps tchi_cpu_steps_f32_plain = STEPS_TABLE;
