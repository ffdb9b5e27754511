/* The optimizers' float64 loops for any processor: the reference. */
#define REAL double
#define REAL_SQRT sqrt
#include "steps_body.h"

const tchi_cpu_steps tchi_cpu_steps_f64_plain = STEPS_TABLE;
