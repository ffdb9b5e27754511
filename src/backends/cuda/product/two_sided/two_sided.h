/* Batched two-sided products, P = L X R', of float32 matrices computed in float16: see two_sided.cu. */
#ifndef TCHI_CUDA_TWO_SIDED_H
#define TCHI_CUDA_TWO_SIDED_H

#include "backends/cuda/cuda.h"

TCH_BEGIN_DECLS

/* Scales of the operands' fp16 copies, as the bits of their largest elements (matrix/fp16_copy.h). */
typedef struct tchi_transposed_scales {
    const uint32_t *a;      /* of A, or NULL if it is at most 1 and unscaled */
    const uint32_t *before; /* of the A of the product that made B, or NULL */
    const uint32_t *b;      /* of the source of B; only used for a C of float32 */
    int32_t power;          /* sums are multiplied by 2^power */
} tchi_transposed_scales;

/* C = (op(A) B)' for A of float32 and B of float16. A C of float16 is 2^power times the product of the scaled operands;
 * for float32 the scales are undone. `partial`, or NULL, gets tchi_cuda_transposed_partials numbers per matrix that add
 * up to the squares of a C of float32. */
int tchi_cuda_transposed_product_supported(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *b,
                                           const tch_matrices *c);
tch_status tchi_cuda_transposed_product(tchi_cuda_state *state, const tch_matrices *a, int32_t transposed_a,
                                        const tch_matrices *b, const tch_matrices *c,
                                        const tchi_transposed_scales *scales, double *partial);
/* Whether factors and sides support float16 blocks at the front of their buffers. */
int tchi_cuda_fp16_sides_supported(const tchi_cuda_state *state, const tch_block_sides *sides);

/* `update_factors` of one factor with the other side's root, unpacked, for blocks of float16. */
tch_status tchi_cuda_whitened_factor(tchi_cuda_state *state, const tch_blocks *blocks, const tch_factor_update *how,
                                     const tch_matrices *root);

/* For rows and columns of op(A) B. */
int64_t tchi_cuda_transposed_partials(int64_t rows, int64_t cols);

TCH_END_DECLS

#endif
