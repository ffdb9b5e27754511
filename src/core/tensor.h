/* Internal tensor functions: element types of the operations table, addresses, strides, views. */
#ifndef TCHI_TENSOR_H
#define TCHI_TENSOR_H

#include <stdbool.h>

#include <torchium/backend.h>
#include <torchium/tensor.h>

/* The tch_scalar of a dtype; TCH_SCALAR_COUNT if unknown. */
tch_scalar tchi_scalar_of(tch_dtype dtype);
int64_t tchi_scalar_size(tch_scalar type);
bool tchi_scalar_is_float(tch_scalar type);

/* Address of the first element. */
void *tchi_tensor_data(const tch_tensor *tensor);

/* Stride of a dimension, in elements, also where `strides` is NULL. */
int64_t tchi_tensor_stride(const tch_tensor *tensor, int32_t dimension);

/* Product of the sizes of dimensions [from, to). */
int64_t tchi_tensor_count(const tch_tensor *tensor, int32_t from, int32_t to);

/* Bytes of all elements. */
int64_t tchi_tensor_bytes(const tch_tensor *tensor);

bool tchi_on_host(const tch_tensor *tensor);

/* Calls `visit` on chunks of at most `room` elements in row-major order, until one fails. Only descriptions are
 * computed: the tensor may be on a device. */
typedef tch_status (*tchi_chunk_visitor)(void *user, tch_tensor *chunk);
tch_status tchi_visit_chunks(const tch_tensor *tensor, int64_t room, tchi_chunk_visitor visit, void *user);

/* The tensor as an array of the table. `strides` is storage of TCH_MAX_RANK for the view to point into. */
tch_array tchi_array_of(const tch_tensor *tensor, int64_t *strides);

/* Lowest and one-past-highest byte the tensor touches; both NULL when it has no elements. */
void tchi_tensor_extent(const tch_tensor *tensor, const char **low, const char **high);

/* Whether [..., rows, cols] can be addressed as one batch with unit column stride, and that batch. Dimensions of size 1
 * may have any stride. Rank 2 is a batch of 1. */
bool tchi_matrices_of(const tch_tensor *tensor, tch_matrices *matrices);

/* A contiguous batch in scratch memory. */
tch_matrices tchi_matrices_new(void *data, tch_scalar type, int64_t batch, int64_t rows, int64_t cols);

/* Matrices [first, first + count). */
tch_matrices tchi_matrices_part(const tch_matrices *matrices, int64_t first, int64_t count);

/* Rows [row, row + rows) and columns [col, col + cols) of every matrix, not of the split type. */
tch_matrices tchi_matrices_block(const tch_matrices *matrices, int64_t row, int64_t col, int64_t rows, int64_t cols);

#endif
