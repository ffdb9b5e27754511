/* What the two ways to a Gram matrix of gradients share: see gram.c for which is taken. Both halves come
 * out of either, the same up to rounding. */
#ifndef TCHI_GRAD_GRAM_H
#define TCHI_GRAD_GRAM_H

#include <torchium/grad.h>

#include "core/context.h"
#include "core/tensor.h"

#include "positions.h"
#include "walk.h"

typedef struct tchi_gram_call {
    const tch_layer *layer;
    tchi_side a, g;
    tch_matrices gram;
    double square;   /* of the layer's scale */
    tch_scalar type; /* of products: float32, or float64 where the sides are */
} tchi_gram_call;

/* Rows and columns of a single matrix. */
tch_matrices tchi_block(const tch_matrices *x, int64_t row, int64_t rows, int64_t col, int64_t cols);

/* out = X', both single matrices. */
tch_status tchi_transpose(tch_context *context, const tch_matrices *x, const tch_matrices *out);

/* gram = 0, unless the caller accumulates. */
tch_status tchi_clear_gram(tch_context *context, int32_t accumulate, const tch_tensor *gram);

/* From inner products of positions, for one group: bytes of scratch, and the sums. */
int64_t tchi_gram_positions_bytes(tch_context *context, const tchi_gram_call *c);
tch_status tchi_gram_by_positions(tch_context *context, const tchi_gram_call *c);

/* From slices of the gradients. */
int64_t tchi_gram_slices_bytes(tch_context *context, const tchi_gram_call *c);
tch_status tchi_gram_by_slices(tch_context *context, const tchi_gram_call *c);

/* gram += square X X', with a row of X for each sample. Where the result has another type than X, some rows of the
 * product at a time go through scratch. */
typedef struct tchi_row_products {
    tch_matrices products, converted;
} tchi_row_products;
tchi_row_products tchi_row_products_layout(tchi_arena *arena, const tch_context *context, const tchi_gram_call *c);
tch_status tchi_gram_add_rows(tch_context *context, const tchi_gram_call *c, const tch_matrices *x,
                              const tchi_row_products *products);

#endif
