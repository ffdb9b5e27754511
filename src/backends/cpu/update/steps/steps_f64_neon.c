/* The optimizers' float64 loops for aarch64, which the compiler vectorizes as they are. */
#define REAL double
#define REAL_SQRT sqrt
#include "steps_body.h"

const tchi_cpu_steps tchi_cpu_steps_f64_neon = STEPS_TABLE;
