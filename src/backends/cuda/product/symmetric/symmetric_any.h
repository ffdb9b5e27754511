/* What symmetric_product.c falls back on where no faster way takes the operands. */
#ifndef TCHI_CUDA_SYMMETRIC_ANY_H
#define TCHI_CUDA_SYMMETRIC_ANY_H

#include "backends/cuda/cuda.h"

TCH_BEGIN_DECLS

/* C = c0 I + c1 D + c2 A B', the lower half mirrored, for any float types, the split type included; D may be NULL. */
tch_status tchi_cuda_symmetric_any(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d, double c2,
                                   const tch_matrices *a, const tch_matrices *b, const tch_matrices *c);

/* Makes square matrices symmetric by copying what is below the diagonal to above it. */
tch_status tchi_cuda_mirror_lower(tchi_cuda_state *state, const tch_matrices *c);

TCH_END_DECLS

#endif
