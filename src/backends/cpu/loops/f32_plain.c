/* The loops in float32, and the conversions, for any processor: the reference. */
#include "f32_body.h"

const tchi_loops tchi_loops_f32_plain = LOOPS_TABLE;
const tchi_cpu_steps tchi_cpu_steps_f32_plain = STEPS_TABLE;
const tchi_conversions tchi_conversions_plain = CONVERSIONS_TABLE;
