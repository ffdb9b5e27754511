/* BLAS calls divided among threads, in float32: see parallel_blas.h. */
#define REAL float
#define REAL_BLAS tchi_blas_f32
#define REAL_FIELD f32
#include "parallel_blas_body.h"

const tchi_parallel_blas tchi_parallel_blas_f32 = PARALLEL_BLAS_TABLE;
