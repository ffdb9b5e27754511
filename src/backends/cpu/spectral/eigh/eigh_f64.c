/* The symmetric eigensolver in double precision; eigh_f32.c explains the constants. */
#define REAL double
#define REAL_BLAS tchi_blas_f64
#define REAL_FIELD f64
#define ROUND_OFF 0x1p-53
#define SMALLEST_SQUARES 0x1p-900
#define MAX_SCALING 1022
#define LEAF_TOLERANCE 0x1p-52
#define SECULAR_TOLERANCE 0x1p-46
#include "eigh_body.h"

const tchi_cpu_eigh_solver tchi_cpu_eigh_f64 = {eigh_scratch_bytes, solve_eigh};
