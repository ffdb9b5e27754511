/* Blocks and the matrices along their dimensions: Gram matrices into factors, and products with roots or bases. A block
 * of order k is a tensor; dimension d of it is seen as [outer, size, inner]. */
#ifndef TCHI_OPTIM_TENSOR_MODES_H
#define TCHI_OPTIM_TENSOR_MODES_H

#include "rects.h"

/* Whether the run's blocks are matrices with factors on both sides whose products may be rounded; then what they meet
 * on their way, for blocks in two work buffers, either of which may be NULL. */
bool tchi_run_sides(const tch_optimizer *optimizer, const tchi_run *run, void *first, void *second,
                    tch_block_sides *sides);

/* Adds the Gram matrices of gathered gradients to the run's factors, with the weights of `clock`. `spare` is a work
 * buffer, used where a dimension has others on both sides. */
tch_status tchi_run_update_factors(tch_optimizer *optimizer, const tchi_run *run, const tch_blocks *gradients,
                                   void *spare, const tch_clock *clock);

/* Multiplies blocks along every dimension that has a factor by the run's roots or bases (out of bases: by their
 * transposes), going back and forth between their work buffer and *other. Both say afterwards where the result is and
 * where it is not; norms[i] is its norm, where that is not NULL. */
tch_status tchi_run_precondition(tch_optimizer *optimizer, const tchi_run *run, tch_sides sides, tch_blocks *blocks,
                                 void **other, double *norms);

/* Copies blocks without gaps, `stride` elements apart, with dimension k brought to the front: [outer, size, inner]
 * becomes [size, outer, inner]; or back. */
tch_status tchi_transpose_blocks(tch_optimizer *optimizer, const tchi_block_batch *block_batch, int32_t k,
                                 int64_t stride, int64_t blocks, void *plain, void *transposed, bool back);

/* Whether a dimension of the block batch has others on both sides. */
bool tchi_block_batch_has_middle(const tchi_block_batch *block_batch);

#endif
