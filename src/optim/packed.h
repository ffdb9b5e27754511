/* Factors and roots as matrices, however they are kept: as lower triangles with `packed_factors`, and roots so and in
 * bfloat16 with `root_dtype`. A step unpacks some of them at a time. Bases are not symmetric, and always whole. */
#ifndef TCHI_OPTIM_PACKED_H
#define TCHI_OPTIM_PACKED_H

#include "optimizer.h"

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

/* Matrices [first, first + count) as they are kept: with an `ld` of 0 where they are packed, as the table has it. */
tch_matrices tchi_matrices_kept(const tchi_factor_batch *factor_batch, tchi_matrix_kind kind, int64_t first,
                                int64_t count);

/* The same, unpacked into `room` where they are not whole. */
tch_status tchi_matrices_open(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch,
                              tchi_matrix_kind kind, int64_t first, int64_t count, void *room, tch_matrices *matrices);

/* Keeps what was made of them. */
tch_status tchi_matrices_close(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch,
                               tchi_matrix_kind kind, int64_t first, const tch_matrices *matrices);

/* All roots and bases become the identity. */
tch_status tchi_matrices_begin(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch);

#endif
