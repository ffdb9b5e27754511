/* Gram-Schmidt for the rows of large float32 matrices, mostly in float16 products: numbers are split into two float16
 * (tch_split_rows_op), together as accurate as float32, so a product takes three float16 products. For backends that
 * have `split_rows`. Errors are in docs/numerics/soap-basis.md, the optimization log in bench/logs/cuda_basis.md. */
#ifndef TCHI_GRAM_SCHMIDT_H
#define TCHI_GRAM_SCHMIDT_H

#include "core/context.h"

/* Scratch for a batch of rows by cols, aligned for products. */
tch_split_matrices tchi_split_layout(tchi_arena *arena, int64_t batch, int64_t rows, int64_t cols);

/* split = X scale. */
tch_status tchi_split(tch_context *context, const tch_matrices *x, double scale, tch_split_matrices *split);

/* tch_split_product_op, by the backend's own kernel or as separate float16 products. */
tch_status tchi_split_product(tch_context *context, const tch_split_problem *problem);

/* Scales numbers of size 1, such as those of orthonormal rows, so that their low parts are in the range of float16. */
#define TCHI_SPLIT_UNIT 256.0

/* Bytes of scratch for tchi_gram_schmidt on `batch` matrices of n by n. */
int64_t tchi_gram_schmidt_bytes(tch_context *context, int64_t n, int64_t batch);

/* Orthonormalizes the rows of S, n by n float32: each leading span is preserved, and rows keep their signs. `planes`,
 * of S's shape, receives the same rows split. A matrix whose flag is not OK is undefined on return; linearly dependent
 * rows are flagged TCH_REPORT_NOT_POSITIVE. */
tch_status tchi_gram_schmidt(tch_context *context, const tch_matrices *s, const tch_split_matrices *planes,
                             int32_t *flags, void *scratch);

#endif
