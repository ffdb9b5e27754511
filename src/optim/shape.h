/* A parameter as second-order methods see it: its dimensions in memory order, some of them merged, each divided into
 * blocks. */
#ifndef TCHI_OPTIM_SHAPE_H
#define TCHI_OPTIM_SHAPE_H

#include "optimizer.h"

/* The dimensions above 1, outermost in memory first; false if the elements have gaps. */
bool tchi_dims_of(const tch_tensor *tensor, tchi_dims *dims);

/* Merges neighbors from the innermost out while their product is at most `most`, down to at least `least`
 * dimensions. */
void tchi_dims_merge(tchi_dims *dims, int64_t most, int32_t least);

/* Merges the neighbors with the smallest product until at most `order` dimensions remain. */
void tchi_dims_limit(tchi_dims *dims, int32_t order);

/* Merges all but the first dimension. */
void tchi_dims_as_matrix(tchi_dims *dims);

int64_t tchi_dims_count(const tchi_dims *dims);

/* Whether the strides decrease in the order of the dimensions. */
bool tchi_is_row_major(int32_t ndim, const int64_t *shape, const int64_t *strides);

/* Whether side k of a block is more than TCHI_THIN times as long as the product of the others. Its factor would take
 * that many steps to reach full rank, and its root would cost size / others times as much per element as that of a
 * square block, so the side has no factor. */
#define TCHI_THIN 100
bool tchi_is_thin_side(int32_t order, const int64_t *size, int32_t k);

/* The blocks of a parameter: every matrix of it is divided into parts of `most` along each dimension, the last one
 * shorter. Dimension k > 0 has counts[k] parts. */
typedef struct tchi_cut {
    int32_t order;
    int64_t most;
    int64_t dims[TCHI_MOST_ORDER], counts[TCHI_MOST_ORDER];
    const int64_t *cuts; /* of the parameter, or NULL */
    int32_t cut_count;
    int64_t blocks;
} tchi_cut;

/* With `most` = INT64_MAX only the matrices are separated. */
tchi_cut tchi_cut_of(const tchi_param *param, int64_t most);

/* The start and sizes of block `number`. */
void tchi_cut_block(const tchi_cut *cut, int64_t number, int64_t *start, int64_t *size);

#endif
