/* Kernels for a factor C = alpha A A' + beta C, or alpha A' A + beta C, in float32 from operands of float32 rounded to
 * TF32 or of a half type. They read C's lower triangle and write both. */
#ifndef TCHI_CUDA_FACTOR_GRAM_H
#define TCHI_CUDA_FACTOR_GRAM_H

#include "backends/cuda/cuda.h"

TCH_BEGIN_DECLS

/* The lower trapezoids of `panels` panels of columns by cuBLAS, mirrored. */
tch_status tchi_cuda_factor_gram_panels(tchi_cuda_state *state, int64_t panels, double alpha, const tch_matrices *a,
                                        int32_t transpose, double beta, const tch_matrices *c);

/* Weights of the product and of C. */
typedef struct tchi_factor_weights {
    float alpha, beta;
    const float *on_device; /* NULL, or on the device: alpha times the first, and the second in place of beta */
    int32_t adds;           /* beta is 1: adds to an earlier part of the contraction */
} tchi_factor_weights;

/* The lower tiles of alpha A A' + beta C, or with `transpose` of alpha A' A + beta C, by symmetric_pingpong.cu: sm_90,
 * A an fp16 copy (tchi_cuda_fp16_copy). A C whose `ld` is 0 is packed. */
int tchi_cuda_factor_pingpong_supported(const tchi_cuda_state *state, const tch_matrices *c);
tch_status tchi_cuda_factor_pingpong(tchi_cuda_state *state, tchi_factor_weights weights, const tch_matrices *a,
                                     int32_t transpose, const uint32_t *largest, const tch_matrices *c);

/* The same for A of float32, through fp16 copies in the workspace: as many matrices at a time as it holds, or part of
 * the contraction of one. */
int tchi_cuda_factor_fp16_supported(const tchi_cuda_state *state, const tch_matrices *a, int32_t transpose,
                                    const tch_matrices *c);
tch_status tchi_cuda_factor_fp16(tchi_cuda_state *state, tchi_factor_weights weights, const tch_matrices *a,
                                 int32_t transpose, const tch_matrices *c);

/* Both factors of A, of float32, from one fp16 copy; the largest element is computed once unless given. Copies are in
 * `scratch` if that is larger than the workspace, as many matrices at a time as fit. A of float16 already is such a
 * copy. */
typedef struct tchi_factor_pair {
    const tch_matrices *a, *rows, *cols;
    const uint32_t *largest; /* of each matrix, or NULL */
    void *scratch;
    int64_t bytes;
} tchi_factor_pair;

int tchi_cuda_factor_pair_supported(const tchi_cuda_state *state, const tchi_factor_pair *pair);
tch_status tchi_cuda_factor_pair(tchi_cuda_state *state, tchi_factor_weights weights, const tchi_factor_pair *pair);

TCH_END_DECLS

#endif
