/* Factors and roots as matrices, however they are kept: as lower triangles with `packed_factors`, and roots so and in
 * bfloat16 with `root_dtype`. A step unpacks some of them at a time. Bases are not symmetric, and always whole.
 *
 * Blocks and the matrices along their dimensions: Gram matrices into factors, and products with roots or bases. A block
 * of order k is a tensor; dimension d of it is seen as [outer, size, inner]. */
#ifndef TCHI_OPTIM_TENSOR_MODES_H
#define TCHI_OPTIM_TENSOR_MODES_H

#include "rects.h"

typedef enum tchi_matrix_kind { TCHI_FACTORS, TCHI_ROOTS } tchi_matrix_kind;

/* Elements of one factor, root or basis, as it is kept, their type and their bytes. */
int64_t tchi_kept_elements(const tchi_factor_batch *factor_batch, tchi_matrix_kind kind);
tch_scalar tchi_kept_type(const tchi_factor_batch *factor_batch, tchi_matrix_kind kind);
int64_t tchi_kept_bytes(const tchi_factor_batch *factor_batch, tchi_matrix_kind kind);
bool tchi_is_packed(const tchi_factor_batch *factor_batch, tchi_matrix_kind kind);
char *tchi_kept_at(const tchi_factor_batch *factor_batch, tchi_matrix_kind kind, int64_t index);

/* Bytes of work buffers for the matrices of one block: of both sides of a matrix, or of a factor and its root, and of
 * more dimensions one after the other; 0 where none is packed. */
int64_t tchi_unpacked_bytes(const tch_optimizer *optimizer, const tchi_block_batch *block_batch);

/* How many of `count` factors, with what is made of them, fit into the work buffers, in parts of about equal length. */
int64_t tchi_unpacked_fit(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch, int64_t count);

/* Matrices [first, first + count), unpacked into `room` where they are not kept whole. */
tch_status tchi_matrices_open(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch,
                              tchi_matrix_kind kind, int64_t first, int64_t count, void *room, tch_matrices *matrices);

/* Keeps what was made of them. */
tch_status tchi_matrices_close(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch,
                               tchi_matrix_kind kind, int64_t first, const tch_matrices *matrices);

/* All roots and bases become the identity. */
tch_status tchi_matrices_begin(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch);

/* --- along the dimensions of blocks ------------------------------------------------------------------------------ */

/* Whether the run's blocks are matrices with factors on both sides whose products may be rounded; then what they meet
 * on their way, for blocks in two work buffers, either of which may be NULL. */
bool tchi_run_sides(const tch_optimizer *optimizer, const tchi_run *run, void *first, void *second,
                    tch_block_sides *sides);

/* Adds the Gram matrices of gathered gradients to the run's factors, with the weights of `clock`. `spare` is a work
 * buffer, used where a dimension has others on both sides. */
tch_status tchi_run_update_factors(tch_optimizer *optimizer, const tchi_run *run, const tch_blocks *gradients,
                                   void *spare, const tch_clock *clock);

/* The same for dimension k alone, of gradients multiplied by the roots of all other dimensions and divided by the root
 * of the number of elements along them: KL-Shampoo's factor. `buffers` are two work buffers; they may be one where a
 * block has two dimensions. */
tch_status tchi_run_update_whitened_factor(tch_optimizer *optimizer, const tchi_run *run, int32_t k,
                                           const tch_matrices *gradients, void *const buffers[2],
                                           const tch_clock *clock);

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
