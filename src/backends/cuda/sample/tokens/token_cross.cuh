/* What the two ways of token_cross share: by float32 or float64 arithmetic in token_cross.cu, by tensor cores for half
 * types in token_cross_mma.cu. */
#ifndef TCHI_CUDA_TOKEN_CROSS_CUH
#define TCHI_CUDA_TOKEN_CROSS_CUH

#include "token_order.cuh"

#define TCHI_CUDA_CROSS_TILE 128 /* positions of H and of A */
#define TCHI_CUDA_CROSS_RANGES 8 /* that the positions of A are cut into, for more blocks than tiles of H */

typedef struct tchi_cuda_cross {
    tchi_cuda_token_list list; /* of H's positions */
    tchi_cuda_operand h, a, g;
    int64_t samples, tiles; /* of a sample's H */
    int64_t rows, cols;     /* positions of A, columns of A and H */
} tchi_cuda_cross;

/* Whether tensor cores take these; partial[(sample tiles + tile) ranges + range] gets the sums. */
bool tchi_cuda_token_cross_mma_supported(const tchi_cuda_state *state, const tch_matrices *h, const tch_matrices *a);
tch_status tchi_cuda_token_cross_mma(const tchi_cuda_state *state, const tchi_cuda_cross &c, const tch_matrices *h,
                                     const tch_matrices *a, double *partial);

#endif
