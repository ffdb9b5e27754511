/* Samples of a tensor of any shape and strides as the rows of one packed matrix, each with all elements of its
 * sample in order: the caller's memory where it lies so, scratch otherwise. And what is done with rows, one for each
 * sample. */
#ifndef TCHI_GRAD_SAMPLE_ROWS_H
#define TCHI_GRAD_SAMPLE_ROWS_H

#include "core/context.h"
#include "core/tensor.h"

/* Rows [first, first + count) along the first dimension, in the layout of a call, which runs twice. */
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
