/* What products.c has for a contraction of one step. */
#ifndef TCHI_CUDA_OUTER_H
#define TCHI_CUDA_OUTER_H

#include "backends/cuda/cuda.h"

TCH_BEGIN_DECLS

/* C = alpha op(A) op(B), op(A) having one column and op(B) one row; C is not read. Any float types. */
tch_status tchi_cuda_outer(tchi_cuda_state *state, double alpha, const tch_matrices *a, int32_t transpose_a,
                           const tch_matrices *b, int32_t transpose_b, const tch_matrices *c);

TCH_END_DECLS

#endif
