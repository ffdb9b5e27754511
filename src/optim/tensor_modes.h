/* Blocks and the matrices along their dimensions: Gram matrices into factors, and products with roots or bases. A block
 * of order k is a tensor; dimension d of it is seen as [outer, size, inner]. */
#ifndef TCHI_OPTIM_TENSOR_MODES_H
#define TCHI_OPTIM_TENSOR_MODES_H

#include "rects.h"

/* Adds the Gram matrices of the blocks in `buffer` to the run's factors, with the weights of `clock`. `spare` is a work
 * buffer, used where a dimension has others on both sides; `largest` is what gather_graft left of them, or NULL. */
tch_status tchi_run_update_factors(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *work, void *buffer,
                                   void *spare, const uint32_t *largest, const tch_clock *clock);

/* Multiplies the blocks in *from along every dimension that has a factor by the run's roots or bases (out of bases: by
 * their transposes), going back and forth between the two buffers; *from is where the result is, and norms[i] its norm,
 * where that is not NULL. `largest` is what gather_graft left of the blocks, or NULL. */
tch_status tchi_run_multiply(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *work, tch_sides sides,
                             const uint32_t *largest, void **from, void **to, double *norms);

/* Whether the run's factors take blocks of float16, and its roots, with results of float32 in `result`; and the product
 * of such blocks with them. `other` has room for as many bytes as the blocks have. */
bool tchi_run_takes_halves(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *work, void *result);
tch_status tchi_run_multiply_halves(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *halves,
                                    tch_sides sides, void *blocks, const uint32_t *largest, void *other,
                                    const tchi_work *work, void *result, double *norms);

/* Copies blocks without gaps, `stride` elements apart, with dimension k brought to the front: [outer, size, inner]
 * becomes [size, outer, inner]; or back. */
tch_status tchi_turn_blocks(tch_optimizer *optimizer, const tchi_block_batch *block_batch, int32_t k, int64_t stride,
                            int64_t blocks, void *plain, void *turned, bool back);

/* Whether a dimension of the block batch has others on both sides. */
bool tchi_block_batch_has_middle(const tchi_block_batch *block_batch);

#endif
