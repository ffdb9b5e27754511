/* Tensors as matrices of the operation table: parameters of a layer, and samples of any shape as rows. Suitable memory
 * is used directly; other layouts are copied through scratch. */
#ifndef TCHI_GRAD_TENSOR_ROWS_H
#define TCHI_GRAD_TENSOR_ROWS_H

#include <stdbool.h>

#include "core/context.h"
#include "core/tensor.h"

/* A parameter, or one per sample: `groups` consecutive matrices, rows by cols. */
typedef struct tchi_parameter {
    bool given; /* 0: absent; takes no memory and is not read or written */
    void *data;
    tch_scalar type;
    int64_t groups, rows, cols;
    int64_t sample_stride; /* 0 for a single parameter */
    bool plain;            /* contiguous elements, and samples at one stride of matrices */
    int32_t rank;          /* of one parameter */
    int64_t sizes[TCH_MAX_RANK], strides[TCH_MAX_RANK];
} tchi_parameter;

/* `tensor` may be NULL. */
tchi_parameter tchi_parameter_of(const tch_tensor *tensor, bool per_sample, int64_t groups, int64_t rows, int64_t cols);

/* Samples [first, first + count), or 0 and 1 for a single parameter: the caller's memory if plain and of this type,
 * otherwise scratch. */
tch_matrices tchi_parameter_place(const tchi_parameter *p, tchi_arena *arena, tch_scalar type, int64_t first,
                                  int64_t count);

/* Converts between the tensor and the memory of `place`; no-op if that is the tensor's. */
tch_status tchi_parameter_read(tch_context *context, const tchi_parameter *p, int64_t first, const tch_matrices *m);
tch_status tchi_parameter_write(tch_context *context, const tchi_parameter *p, int64_t first, const tch_matrices *m);

/* --- rows of samples --------------------------------------------------------------------------------------------- */

/* Rows [first, first + count) along the first dimension as one packed matrix, with all elements of a sample in a row;
 * the layout runs twice. */
tch_matrices tchi_rows_place(const tch_tensor *tensor, tch_scalar type, tchi_arena *arena, int64_t first,
                             int64_t count);

/* No-op if the rows are the caller's memory. */
tch_status tchi_rows_read(tch_context *context, const tch_tensor *tensor, int64_t first, const tch_matrices *rows);

/* The same rows as a batch of single-row matrices. */
tch_matrices tchi_each_row(const tch_matrices *rows);

/* dots[i] += scale times the inner product of row i with the direction, or without one with itself. */
tch_status tchi_rows_dots(tch_context *context, const tch_matrices *rows, const tch_matrices *direction, double scale,
                          double *dots, void *scratch);

/* out = beta out + scale times the sum of weights[i] times row i; weights rows in place. `weights` may be NULL. */
tch_status tchi_rows_sum(tch_context *context, const tch_matrices *rows, const double *weights, double scale,
                         double beta, const tch_matrices *out, void *scratch);

#endif
