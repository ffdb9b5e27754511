/* BLAS calls divided among threads, in float64: see parallel_blas.h. */
#define REAL double
#define REAL_BLAS tchi_blas_f64
#define REAL_FIELD f64
#include "parallel_blas_body.h"

const tchi_parallel_blas tchi_parallel_blas_f64 = PARALLEL_BLAS_TABLE;
