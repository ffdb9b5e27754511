/* Tensors seen as batches: any leading dimensions and strides on the caller's side, one contiguous batch of a compute
 * type on the algorithm's side. Algorithms read a part of the batch into scratch, work there, and write it back. */
#ifndef TCHI_BATCH_H
#define TCHI_BATCH_H

#include <stdbool.h>

#include "core/context.h"
#include "core/tensor.h"

typedef struct tchi_batch {
    void *data;
    tch_scalar type;
    int32_t rank; /* leading dimensions left after merging */
    int64_t sizes[TCH_MAX_RANK], strides[TCH_MAX_RANK];
    int64_t count; /* matrices in all */
    int64_t rows, cols, row_stride, col_stride;
} tchi_batch;

/* Dimensions [from, to) of the tensor, where neighbors that can be walked as one are merged: at least one. *rank is 0
 * before. Returns the number of their elements. */
int64_t tchi_merge_dimensions(const tch_tensor *tensor, int32_t from, int32_t to, int32_t *rank, int64_t *sizes,
                              int64_t *strides);

/* `inner` is how many trailing dimensions make one item: 2 for matrices, 1 for vectors (1 by n), 0 for numbers (1 by
 * 1). */
tchi_batch tchi_batch_of(const tch_tensor *tensor, int32_t inner);

/* The same items, each read as its transpose. */
tchi_batch tchi_batch_transposed(tchi_batch batch);

/* The type to compute in for elements of this type: float64 for float64, float32 for the rest. */
tch_scalar tchi_compute_type(tch_scalar type);

/* Address of the first element of one item. */
void *tchi_batch_item(const tchi_batch *batch, int64_t index);

/* Items [first, first + dst->batch) into dst, converted. */
tch_status tchi_batch_read(tch_context *context, const tchi_batch *batch, int64_t first, const tch_matrices *dst);

/* And back. */
tch_status tchi_batch_write(tch_context *context, const tchi_batch *batch, int64_t first, const tch_matrices *src);

/* Writes the items whose flag is 0 and leaves the others. `spare` is scratch like src, used when the batch's own layout
 * cannot be written selectively; tchi_batch_is_plain says when it is not needed. */
tch_status tchi_batch_select(tch_context *context, const tchi_batch *batch, int64_t first, const int32_t *flags,
                             const tch_matrices *src, const tch_matrices *spare);
bool tchi_batch_is_plain(const tchi_batch *batch);

/* Items [first, first + count) as matrices of the table without a copy, when layout and type allow it. */
bool tchi_batch_direct(const tchi_batch *batch, tch_scalar type, int64_t first, int64_t count, tch_matrices *matrices);

/* The same where possible, and otherwise scratch of that shape for the caller to fill or to write back from. */
tch_matrices tchi_batch_place(const tchi_batch *batch, tchi_arena *arena, tch_scalar type, int64_t first, int64_t count,
                              bool *in_place);

/* Scratch whose rows start at whole 16 bytes in every type, as fast products want them. */
tch_matrices tchi_scratch_aligned(tchi_arena *arena, tch_scalar type, int64_t count, int64_t rows, int64_t cols);

/* Scratch for a contiguous batch. */
tch_matrices tchi_scratch_matrices(tchi_arena *arena, tch_scalar type, int64_t count, int64_t rows, int64_t cols);

#endif
