/* Samples of a tensor of any shape and strides as the rows of one packed matrix, each with all elements of its sample
 * in order: the caller's memory where it lies so, scratch otherwise. A parameter, which has no samples, is all its
 * rows. */
#ifndef TCHI_GRAD_SAMPLE_ROWS_H
#define TCHI_GRAD_SAMPLE_ROWS_H

#include <stdbool.h>

#include "core/context.h"
#include "core/tensor.h"

/* The tensor, of rank 1 at least, is packed and of this type. */
bool tchi_rows_in_place(const tch_tensor *tensor, tch_scalar type);

/* Rows [first, first + count) along the first dimension, in the layout of a call, which runs twice. */
tch_matrices tchi_rows_place(const tch_tensor *tensor, tch_scalar type, tchi_arena *arena, int64_t first,
                             int64_t count);

/* Nothing to do where the rows are the caller's memory. */
tch_status tchi_rows_read(tch_context *context, const tch_tensor *tensor, int64_t first, const tch_matrices *rows);
tch_status tchi_rows_write(tch_context *context, const tch_tensor *tensor, int64_t first, const tch_matrices *rows);

/* The chunks that `samples` are done in. The last one is smaller, but may need more scratch, since a device that has
 * little to do divides it further: a call that reserves memory once for all chunks measures both. */
typedef struct tchi_chunks {
    int64_t samples, size;
} tchi_chunks;

static inline int64_t tchi_chunk_at(const tchi_chunks *chunks, int64_t first)
{
    return chunks->samples - first < chunks->size ? chunks->samples - first : chunks->size;
}

static inline int64_t tchi_chunk_last(const tchi_chunks *chunks)
{
    return chunks->samples % chunks->size;
}

#endif
