/* Factors and roots in their storage format: lower triangles with `packed_factors`, and packed bfloat16 roots with
 * `root_dtype`. A step unpacks some of them at a time. Bases are not symmetric and are always full.
 *
 * Also blocks and the matrices along their dimensions: Gram matrices for factors, products with roots or bases. A block
 * of order k is a tensor; dimension d of it is seen as [outer, size, inner]. */
#ifndef TCHI_OPTIM_TENSOR_MODES_H
#define TCHI_OPTIM_TENSOR_MODES_H

#include "rects.h"

typedef enum tchi_matrix_kind { TCHI_FACTORS, TCHI_ROOTS } tchi_matrix_kind;

/* Elements of one stored factor, root or basis, their type, and their bytes. */
int64_t tchi_kept_elements(const tchi_factor_batch *factor_batch, tchi_matrix_kind kind);
tch_scalar tchi_kept_type(const tchi_factor_batch *factor_batch, tchi_matrix_kind kind);
int64_t tchi_kept_bytes(const tchi_factor_batch *factor_batch, tchi_matrix_kind kind);
bool tchi_is_packed(const tchi_factor_batch *factor_batch, tchi_matrix_kind kind);
char *tchi_kept_at(const tchi_factor_batch *factor_batch, tchi_matrix_kind kind, int64_t index);

/* Bytes of work buffers for the unpacked matrices of one block: both sides of a matrix, or a factor and its root; one
 * dimension at a time for higher orders; 0 if nothing is packed. */
int64_t tchi_unpacked_bytes(const tch_optimizer *optimizer, const tchi_block_batch *block_batch);

/* How many of `count` factors, with their results, fit into the work buffers, in parts of about equal length. */
int64_t tchi_unpacked_fit(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch, int64_t count);

/* Returns matrices [first, first + count), unpacked into `room` if they are packed. */
tch_status tchi_matrices_open(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch,
                              tchi_matrix_kind kind, int64_t first, int64_t count, void *room, tch_matrices *matrices);

/* Stores the result, packed again if needed. */
tch_status tchi_matrices_close(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch,
                               tchi_matrix_kind kind, int64_t first, const tch_matrices *matrices);

/* Sets all roots and bases to the identity. */
tch_status tchi_matrices_begin(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch);

/* --- along dimensions of blocks ---------------------------------------------------------------------------------- */

/* Gathers a run's gradients, and F unless buffers[1] is NULL; then `filtered` is the gradient. With `products` only the
 * functions below read them, so the backend may choose their type. */
tch_status tchi_run_gather(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *work,
                           const tch_gathering *rules, bool products, void *const buffers[2], tch_blocks *gradient,
                           tch_blocks *filtered);

/* Adds the Gram matrices of gathered gradients to the run's factors, with the weights of `clock`. `spare` is a work
 * buffer, used if a dimension is between others. */
tch_status tchi_run_update_factors(tch_optimizer *optimizer, const tchi_run *run, const tch_blocks *gradients,
                                   void *spare, const tch_clock *clock);

/* The same for dimension k only, with gradients multiplied by the roots of all other dimensions and divided by the root
 * of the number of elements along them: KL-Shampoo's factor. `buffers` are two work buffers, which may be the same for
 * blocks of two dimensions. */
tch_status tchi_run_update_whitened_factor(tch_optimizer *optimizer, const tchi_run *run, int32_t k,
                                           const tch_blocks *gradients, void *const buffers[2], const tch_clock *clock);

/* Multiplies blocks by the run's roots or bases (out of bases: their transposes) along every dimension that has a
 * factor, alternating between their work buffer and *other. On return `blocks` points to the result and *other to the
 * free buffer; norms[i] is the result's norm unless NULL. */
tch_status tchi_run_precondition(tch_optimizer *optimizer, const tchi_run *run, tch_sides sides, tch_blocks *blocks,
                                 void **other, double *norms);

/* Copies contiguous blocks, `stride` elements apart, with dimension k moved to the front: [outer, size, inner] becomes
 * [size, outer, inner]; or back. */
tch_status tchi_transpose_blocks(tch_optimizer *optimizer, const tchi_block_batch *block_batch, int32_t k,
                                 int64_t stride, int64_t blocks, void *plain, void *transposed, bool back);

/* Whether a dimension of the block batch is between others. */
bool tchi_block_batch_has_middle(const tchi_block_batch *block_batch);

#endif
