/* Tensors of a layer's parameters, or of one for each sample, as matrices of the table: `groups` of them, rows by cols,
 * following each other. Memory that lies so is used as it is, any other is read and written through scratch. */
#ifndef TCHI_GRAD_PARAMETERS_H
#define TCHI_GRAD_PARAMETERS_H

#include <stdbool.h>

#include "core/context.h"
#include "core/tensor.h"

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

#endif
