/* BLAS calls divided among threads, in float64: see parallel_blas.h. */
#define REAL double
#define REAL_BLAS tchi_blas_f64
#define REAL_FIELD f64
#define PARALLEL_GEMM tchi_cpu_gemm_f64
#define PARALLEL_SYRK tchi_cpu_syrk_f64
#define PARALLEL_SYMM tchi_cpu_symm_f64
#define PARALLEL_POTRF tchi_cpu_potrf_f64
#define PARALLEL_TRSM tchi_cpu_trsm_f64
#define PARALLEL_TRTRI tchi_cpu_trtri_f64
#include "parallel_blas_body.h"
