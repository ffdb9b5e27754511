/* The ways to compute a factor C = alpha A A' + beta C, or alpha A' A + beta C, in float32 from operands of float32
 * rounded to TF32 or of a half type. Of C the lower triangle is read, and both are written. */
#ifndef TCHI_CUDA_FACTOR_GRAM_H
#define TCHI_CUDA_FACTOR_GRAM_H

#include "backends/cuda/cuda.h"

TCH_BEGIN_DECLS

/* The lower trapezoids of `panels` panels of columns by cuBLAS, mirrored. */
tch_status tchi_cuda_factor_gram_panels(tchi_cuda_state *state, int64_t panels, double alpha, const tch_matrices *a,
                                        int32_t transpose, double beta, const tch_matrices *c);

/* The lower tiles of alpha A' A + beta C by wgmma, for A of a half type with aligned rows: sm_90. With `largest`, A
 * holds matrices as tchi_cuda_narrow left them. */
int tchi_cuda_factor_gram_wgmma_takes(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *c);
tch_status tchi_cuda_factor_gram_wgmma(const tchi_cuda_state *state, double alpha, const tch_matrices *a,
                                       const uint32_t *largest, double beta, const tch_matrices *c);

/* The same for A of float32, or of a half type in rows that are not aligned, through copies in the workspace, as many
 * rows at a time as it holds. */
int tchi_cuda_factor_gram_narrow_takes(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *c);
tch_status tchi_cuda_factor_gram_narrow(const tchi_cuda_state *state, double alpha, const tch_matrices *a, double beta,
                                        const tch_matrices *c);

TCH_END_DECLS

#endif
