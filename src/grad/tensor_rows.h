/* Tensors as matrices of the table: a layer's parameters, and samples of any shape as rows. Memory that lies so is used
 * as it is, any other is read and written through scratch. */
#ifndef TCHI_GRAD_TENSOR_ROWS_H
#define TCHI_GRAD_TENSOR_ROWS_H

#include <stdbool.h>

#include "core/context.h"
#include "core/tensor.h"

/* A parameter, or one for each sample: `groups` matrices, rows by cols, following each other. */
typedef struct tchi_parameter {
    bool given; /* otherwise it is none: it takes no memory, and nothing is read or written */
    void *data;
    tch_scalar type;
    int64_t groups, rows, cols;
    int64_t sample_stride; /* where there is one for each sample, 0 otherwise */
    bool plain;            /* its elements lie one after the other, and samples so that matrices have one stride */
    int32_t rank;          /* of one parameter */
    int64_t sizes[TCH_MAX_RANK], strides[TCH_MAX_RANK];
} tchi_parameter;

/* `tensor` may be NULL. */
tchi_parameter tchi_parameter_of(const tch_tensor *tensor, bool per_sample, int64_t groups, int64_t rows, int64_t cols);

/* Samples [first, first + count), or the one parameter with 0 and 1: the caller's memory where it is plain and of this
 * type, scratch otherwise. */
tch_matrices tchi_parameter_place(const tchi_parameter *p, tchi_arena *arena, tch_scalar type, int64_t first,
                                  int64_t count);

/* Between the tensor and what `place` gave, converted; nothing to do where that is the tensor's memory. */
tch_status tchi_parameter_read(tch_context *context, const tchi_parameter *p, int64_t first, const tch_matrices *m);
tch_status tchi_parameter_write(tch_context *context, const tchi_parameter *p, int64_t first, const tch_matrices *m);

/* --- rows of samples --------------------------------------------------------------------------------------------- */

/* Rows [first, first + count) along the first dimension as one packed matrix, each with all elements of its sample in
 * order; in the layout of a call, which runs twice. */
tch_matrices tchi_rows_place(const tch_tensor *tensor, tch_scalar type, tchi_arena *arena, int64_t first,
                             int64_t count);

/* Nothing to do where the rows are the caller's memory. */
tch_status tchi_rows_read(tch_context *context, const tch_tensor *tensor, int64_t first, const tch_matrices *rows);

/* The same rows as a batch of matrices with one row each. */
tch_matrices tchi_each_row(const tch_matrices *rows);

/* dots[i] += scale times the inner product of row i and one direction of as many elements, or without one its
 * square. */
tch_status tchi_rows_dots(tch_context *context, const tch_matrices *rows, const tch_matrices *direction, double scale,
                          double *dots, void *scratch);

/* out = beta out + scale times the sum of weights[i] times row i, which is weighed in place; `weights` may be NULL. */
tch_status tchi_rows_sum(tch_context *context, const tch_matrices *rows, const double *weights, double scale,
                         double beta, const tch_matrices *out, void *scratch);

#endif
