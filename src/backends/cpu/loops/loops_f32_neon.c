/* The float32 loops for aarch64. */
#define REAL float
#define REAL_ABS fabsf
#define OWN_RUNS
#include "loops_body.h"

#define VECTOR float32x4_t
#define LOAD vld1q_f32
#define STORE vst1q_f32
#define SCALE vmulq_n_f32
#define ABS vabsq_f32
#define GREATER vcgtq_f32
#define SELECT vbslq_f32
#define LOAD_DOUBLES(x) vcvt_f64_f32(vld1_f32(x))
#include "loops_neon.h"

const tchi_loops tchi_loops_f32_neon = LOOPS_TABLE;
