/* The symmetric eigensolver in single precision. */
#define REAL float
#define REAL_BLAS tchi_blas_f32
#define REAL_FIELD f32
#define ROUND_OFF 0x1p-24
#define SMALLEST_SQUARES 0x1p-100f /* a sum of squares below this may have lost digits to underflow */
#define MAX_SCALING 126            /* 2 to this power, and to its negative, are normal numbers */
#define LEAF_TOLERANCE 0x1p-32     /* the leaves are solved in double, to well below the unit roundoff */
#define SECULAR_TOLERANCE 0x1p-24  /* reached before the last step, which squares it */
#include "eigh_body.h"

const tchi_cpu_eigh_solver tchi_cpu_eigh_f32 = {eigh_scratch_bytes, solve_eigh};
