/* Gram-Schmidt for the rows of large float32 matrices, mostly in products of float16: numbers are split into two of
 * them (tch_split_rows_op), which together are as good as float32, and a product is three of float16. For backends that
 * have `split_rows`. docs/numerics/soap-basis.md has the errors, bench/logs/cuda_basis.md what was tried. */
#ifndef TCHI_GRAM_SCHMIDT_H
#define TCHI_GRAM_SCHMIDT_H

#include "core/context.h"

/* Scratch for a batch of rows by cols, aligned as products want it. */
tch_split_matrices tchi_split_layout(tchi_arena *arena, int64_t batch, int64_t rows, int64_t cols);

/* split = X scale. */
tch_status tchi_split(tch_context *context, const tch_matrices *x, double scale, tch_split_matrices *split);

/* tch_split_product_op, by the backend's own kernel or as products of float16, one after the other. */
tch_status tchi_split_product(tch_context *context, const tch_split_problem *problem);

/* Numbers of size 1, such as those of orthonormal rows, times this have low parts in the range of float16. */
#define TCHI_SPLIT_UNIT 256.0

/* Bytes of scratch for tchi_gram_schmidt on `batch` matrices of n by n. */
int64_t tchi_gram_schmidt_bytes(tch_context *context, int64_t n, int64_t batch);

/* Rows of S, n by n of float32, become orthonormal, each of the span of those before it and itself as it was, and
 * keeping its sign. `planes`, of S's shape, become the same rows split. A matrix whose flag is not OK is left
 * undefined, and one whose rows cannot be told apart is flagged TCH_REPORT_NOT_POSITIVE. */
tch_status tchi_gram_schmidt(tch_context *context, const tch_matrices *s, const tch_split_matrices *planes,
                             int32_t *flags, void *scratch);

#endif
