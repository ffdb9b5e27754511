/* BLAS calls divided among threads, in float32: see parallel_blas.h. */
#define REAL float
#define REAL_BLAS tchi_blas_f32
#define REAL_FIELD f32
#define PARALLEL_GEMM tchi_cpu_gemm_f32
#define PARALLEL_SYRK tchi_cpu_syrk_f32
#define PARALLEL_SYMM tchi_cpu_symm_f32
#define PARALLEL_POTRF tchi_cpu_potrf_f32
#define PARALLEL_TRSM tchi_cpu_trsm_f32
#define PARALLEL_TRTRI tchi_cpu_trtri_f32
#include "parallel_blas_body.h"
