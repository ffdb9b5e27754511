/* The loops in float64 for any processor: the reference. */
#include "f64_body.h"

const tchi_loops tchi_loops_f64_plain = LOOPS_TABLE;
const tchi_cpu_steps tchi_cpu_steps_f64_plain = STEPS_TABLE;
