/* How a parameter's elements are seen by a second-order method: its dimensions in the order of memory, some of them
 * merged, each cut into blocks. */
#ifndef TCHI_OPTIM_SHAPE_H
#define TCHI_OPTIM_SHAPE_H

#include "optimizer.h"

/* The dimensions above 1, outermost in memory first; false when the elements do not lie without gaps. */
bool tchi_dims_of(const tch_tensor *tensor, tchi_dims *dims);

/* Merges neighbors, from the innermost out, while their product stays within `most`; at least two dimensions stay. */
void tchi_dims_merge(tchi_dims *dims, int64_t most);

/* Merges the neighbors with the smallest product until at most `order` dimensions are left. */
void tchi_dims_limit(tchi_dims *dims, int32_t order);

/* All but the first dimension merged. */
void tchi_dims_as_matrix(tchi_dims *dims);

int64_t tchi_dims_count(const tchi_dims *dims);

/* The blocks of a parameter: dimension k is cut into counts[k] parts of `most`, the last one shorter. */
typedef struct tchi_cut {
    int32_t order;
    int64_t most;
    int64_t dims[TCHI_MOST_ORDER], counts[TCHI_MOST_ORDER];
    int64_t blocks;
} tchi_cut;

/* `most` is INT64_MAX where nothing is cut. */
tchi_cut tchi_cut_of(const tchi_dims *dims, int64_t most);

/* Where block `number` begins, and its sizes. */
void tchi_cut_block(const tchi_cut *cut, int64_t number, int64_t *start, int64_t *size);

#endif
