/* Linear layers and convolutions in one form: a batch of matrices A [T, d] of inputs and G [T, p] of output gradients,
 * a pair per sample and group, whose product G' A is the gradient of the weight. A side is one of the two for the whole
 * batch; its samples are read in chunks.
 *
 *     tchi_side a = tchi_input_side(layer, input);
 *     tch_matrices m = tchi_side_place(&a, &arena, first, count, TCHI_APART);   // in the layout, which runs twice
 *     TCHI_TRY(tchi_side_read(context, &a, first, &m));                         // then m is count * groups matrices
 *
 * If the caller's memory can be used directly, nothing is allocated or copied. */
#ifndef TCHI_GRAD_POSITIONS_H
#define TCHI_GRAD_POSITIONS_H

#include <stdbool.h>

#include <torchium/grad.h>

#include "core/context.h"
#include "core/tensor.h"

typedef struct tchi_side {
    tch_scalar type;         /* of the tensor, and of the matrices */
    int64_t samples, groups; /* number of matrices: their product, groups of a sample consecutive */
    int64_t positions, cols; /* T, and d or p of one group */
    bool patched;            /* the input of a convolution: read by `patches`; the fields below are otherwise */
    tch_patches patches;     /* of all samples */
    void *data;              /* element (0, 0) of the first matrix */
    int64_t sample_stride, group_stride, col_stride;
    int32_t rank; /* dimensions of positions after merging, at least 1 */
    int64_t sizes[TCH_MAX_RANK], strides[TCH_MAX_RANK];
} tchi_side;

/* For LINEAR and CONV, checked by layer.h. Each needs only its tensor. */
tchi_side tchi_input_side(const tch_layer *layer, const tch_tensor *input);
tchi_side tchi_gradient_side(const tch_layer *layer, const tch_tensor *output_gradient);

/* TALL: rows of all samples have one stride `ld`, so that tchi_tall may merge them; for one group only. */
typedef enum tchi_arrangement { TCHI_APART = 0, TCHI_TALL = 1 } tchi_arrangement;

/* The caller's memory can be used directly. Equal for all chunks. */
bool tchi_side_in_place(const tchi_side *side, tchi_arrangement arrangement);

/* The matrices of samples [first, first + count): the caller's memory, or scratch for tchi_side_read. */
tch_matrices tchi_side_place(const tchi_side *side, tchi_arena *arena, int64_t first, int64_t count,
                             tchi_arrangement arrangement);
/* No-op if `place` gave the caller's memory. */
tch_status tchi_side_read(tch_context *context, const tchi_side *side, int64_t first, const tch_matrices *matrices);

/* All positions of tall matrices as one matrix with samples times T rows. */
tch_matrices tchi_tall(const tch_matrices *matrices);

/* The contiguous matrices of `count` samples as one matrix with a row per sample. */
tch_matrices tchi_flat(const tch_matrices *matrices, int64_t count);

/* C = alpha op(A) op(B) + beta C, with TF32 if the layer permits, see tch_layer. */
tch_status tchi_layer_product(tch_context *context, const tch_layer *layer, double alpha, const tch_matrices *a,
                              int32_t transpose_a, const tch_matrices *b, int32_t transpose_b, double beta,
                              const tch_matrices *c);

#endif
