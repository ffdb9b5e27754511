/* The loops in float64 for aarch64. */
#define CUSTOM_RUNS
#include "f64_body.h"

#define VECTOR float64x2_t
#define LOAD vld1q_f64
#define STORE vst1q_f64
#define SCALE vmulq_n_f64
#define ABS vabsq_f64
#define GREATER vcgtq_f64
#define SELECT vbslq_f64
#define LOAD_DOUBLES vld1q_f64
#include "loops_neon.h"

const tchi_loops tchi_loops_f64_neon = LOOPS_TABLE;
const tchi_cpu_steps tchi_cpu_steps_f64_neon = STEPS_TABLE;
