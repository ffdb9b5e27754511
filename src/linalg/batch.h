/* Tensors as batches: any leading dimensions and strides on the caller's side, one contiguous batch of a compute type
 * on the algorithm's side. Algorithms read a part of the batch into scratch, compute there, and write it back. */
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
    int64_t count; /* total number of matrices */
    int64_t rows, cols, row_stride, col_stride;
    const int64_t *picked; /* NULL for all items, or which, ascending */
} tchi_batch;

/* Dimensions [from, to) of the tensor, with neighbors merged where possible; at least one. *rank must be 0 on entry.
 * Returns the number of their elements. */
int64_t tchi_merge_dimensions(const tch_tensor *tensor, int32_t from, int32_t to, int32_t *rank, int64_t *sizes,
                              int64_t *strides);

/* `inner` trailing dimensions form one item: 2 for matrices, 1 for vectors (1 by n), 0 for scalars (1 by 1). */
tchi_batch tchi_batch_of(const tch_tensor *tensor, int32_t inner);

/* Some items of a batch: `count` of them. NULL picks all. */
tchi_batch tchi_batch_pick(tchi_batch batch, const int64_t *picked, int64_t count);

/* The same items, each read as its transpose. */
tchi_batch tchi_batch_transposed(tchi_batch batch);

/* The compute type for elements of this type: float64 for float64, otherwise float32. */
tch_scalar tchi_compute_type(tch_scalar type);

/* Address of the first element of one item. */
void *tchi_batch_item(const tchi_batch *batch, int64_t index);

/* Reads items [first, first + dst->batch) into dst, converted. */
tch_status tchi_batch_read(tch_context *context, const tchi_batch *batch, int64_t first, const tch_matrices *dst);

/* Writes them back. */
tch_status tchi_batch_write(tch_context *context, const tchi_batch *batch, int64_t first, const tch_matrices *src);

/* Writes the items whose flag is 0 and leaves the others unchanged. `spare` is scratch like src, used if the batch's
 * layout cannot be written selectively. */
tch_status tchi_batch_select(tch_context *context, const tchi_batch *batch, int64_t first, const int32_t *flags,
                             const tch_matrices *src, const tch_matrices *spare);

/* Items [first, first + count) as matrices without a copy, if layout and type allow it. */
bool tchi_batch_direct(const tchi_batch *batch, tch_scalar type, int64_t first, int64_t count, tch_matrices *matrices);

/* The same if possible; otherwise scratch of that shape, for the caller to fill or to write back from. */
tch_matrices tchi_batch_place(const tchi_batch *batch, tchi_arena *arena, tch_scalar type, int64_t first, int64_t count,
                              bool *in_place);

/* Scratch with rows aligned to 16 bytes in every type, for fast products. */
tch_matrices tchi_scratch_aligned(tchi_arena *arena, tch_scalar type, int64_t count, int64_t rows, int64_t cols);

/* Scratch for a contiguous batch. */
tch_matrices tchi_scratch_matrices(tchi_arena *arena, tch_scalar type, int64_t count, int64_t rows, int64_t cols);

#endif
