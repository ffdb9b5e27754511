/* The state of an optimizer as a checkpoint has it.
 *
 * One process saves every tensor of its state whole, under its name. Ranks that share an optimizer save each what it
 * has: tiles' factors, roots and moments their owners, under names that do not depend on the number of ranks; what is
 * laid out like a parameter as rectangles of the whole, by those who hold them; what every rank has, one of them. Since
 * a moment is a rectangle of the same whole wherever it was, one process and any number of ranks, replicated or
 * sharded, read each other's checkpoints. */
#ifndef TCHI_OPTIM_SAVED_STATE_H
#define TCHI_OPTIM_SAVED_STATE_H

#include "core/saved.h"

#include "optimizer.h"

/* The shape of a whole parameter. */
int32_t tchi_saved_shape(const tch_optimizer *optimizer, int32_t param, const int64_t **shape);

/* Of what every rank has, this one saves that of the parameter: every rank some. */
bool tchi_saves_param(const tch_optimizer *optimizer, int32_t param);

/* Tensor `index` of the state: to a writer, beside a file, out of a file. */
tch_status tchi_saved_state_add(const tch_optimizer *optimizer, int64_t index, tch_checkpoint_writer *writer,
                                const char *prefix);
tch_status tchi_saved_state_check(const tch_optimizer *optimizer, int64_t index, const tch_checkpoint *file,
                                  const char *prefix);
tch_status tchi_saved_state_read(const tch_optimizer *optimizer, int64_t index, const tch_checkpoint *file,
                                 const char *prefix);

/* How many tensors of the file it is: one, unless the file keeps moments in another form. */
int64_t tchi_saved_state_count(const tch_optimizer *optimizer, int64_t index, const tch_checkpoint *file,
                               const char *prefix);

/* --- saved_forms.c ----------------------------------------------------------------------------------------------- */

/* Whether the file has the symmetric matrix of this name in another form; it has it in that form, of the right size and
 * type; reads it. */
bool tchi_saved_matrix_differs(const tchi_state *state, const tch_checkpoint *file, const char *name);
tch_status tchi_saved_matrix_check(const tchi_state *state, const tch_checkpoint *file, const char *name);
tch_status tchi_saved_matrix_read(const tch_optimizer *optimizer, const tchi_state *state, const tch_checkpoint *file,
                                  const char *name);

/* How the file keeps the moment of this name, which may be in shards; it has it in this form, and of the parameter's
 * size; it has the scales of codes, and they are of these codes; reads moment `k`, with the scales it gets. */
tch_moments tchi_saved_moments_of(const tch_checkpoint *file, const char *name);
tch_status tchi_saved_moment_check(const tchi_param *param, const tch_checkpoint *file, const char *name);
tch_status tchi_saved_scales_check(const tchi_param *param, const tch_checkpoint *file, const char *name);
tch_status tchi_saved_moment_read(const tch_optimizer *optimizer, const tchi_param *param, int32_t k,
                                  const tch_checkpoint *file, const char *name);

/* --- saved_counts.c ---------------------------------------------------------------------------------------------- */

/* What the host counts, as a list of int64_t: for each parameter the steps with a gradient, then the number of steps
 * asked for, then for each factor that is here how often its refresh failed. One process has it in the file as it is,
 * under "counts"; ranks have "P/counts" for each parameter and "P/failures.N" for each tile. */
tch_status tchi_saved_counts_add(tch_optimizer *optimizer, tch_checkpoint_writer *writer, const char *prefix);

/* What one process has written is of the right length, for one process. */
tch_status tchi_saved_counts_check(const tch_optimizer *optimizer, const tch_checkpoint *file, const char *prefix);

/* Reads either into the list, and checks it. */
tch_status tchi_saved_counts_read(const tch_optimizer *optimizer, const tch_checkpoint *file, const char *prefix,
                                  tchi_list *counts);
void tchi_saved_counts_take(tch_optimizer *optimizer, const tchi_list *counts);

/* Whether the file was written by ranks. */
bool tchi_saved_by_ranks(const tch_checkpoint *file, const char *prefix);

/* FNV-1a over some bytes, and over a number. */
#define TCHI_HASH_BEGIN 0xCBF29CE484222325u
uint64_t tchi_hash(uint64_t hash, const void *data, size_t bytes);
uint64_t tchi_hash_number(uint64_t hash, int64_t number);

/* What two optimizers must have in common for one to go on with the state of the other: names, shapes, types and
 * groups. */
uint64_t tchi_saved_model(const tch_optimizer *optimizer);

#endif
