/* The state of an optimizer in a checkpoint.
 *
 * One process saves every state tensor whole, under its name. Ranks that share an optimizer each save their part:
 * owners save the factors, roots and moments of tiles, under names that do not depend on the number of ranks; state
 * with a parameter's layout is saved as rectangles of the whole by the ranks that hold them; replicated state by one
 * rank. Since moments are rectangles of the same whole in any case, one process and any number of ranks, replicated or
 * sharded, read each other's checkpoints. */
#ifndef TCHI_OPTIM_SAVED_STATE_H
#define TCHI_OPTIM_SAVED_STATE_H

#include "core/saved.h"

#include "optimizer.h"

/* The shape of a whole parameter. */
int32_t tchi_saved_shape(const tch_optimizer *optimizer, int32_t param, const int64_t **shape);

/* Whether this rank saves the replicated state of a parameter; such parameters are divided among ranks. */
bool tchi_saves_param(const tch_optimizer *optimizer, int32_t param);

/* State tensor `index`: adds it to a writer, checks it against a file, reads it from a file. */
tch_status tchi_saved_state_add(const tch_optimizer *optimizer, int64_t index, tch_checkpoint_writer *writer,
                                const char *prefix);
tch_status tchi_saved_state_check(const tch_optimizer *optimizer, int64_t index, const tch_checkpoint *file,
                                  const char *prefix);
tch_status tchi_saved_state_read(const tch_optimizer *optimizer, int64_t index, const tch_checkpoint *file,
                                 const char *prefix);

/* The number of tensors of the file that it occupies: 1, unless the file stores moments in another format. */
int64_t tchi_saved_state_count(const tch_optimizer *optimizer, int64_t index, const tch_checkpoint *file,
                               const char *prefix);

/* --- saved_forms.c ----------------------------------------------------------------------------------------------- */

/* Symmetric matrices of this name: whether the file's format differs; whether that format's size and type are right;
 * reads it. */
bool tchi_saved_matrix_differs(const tchi_state *state, const tch_checkpoint *file, const char *name);
tch_status tchi_saved_matrix_check(const tchi_state *state, const tch_checkpoint *file, const char *name);
tch_status tchi_saved_matrix_read(const tch_optimizer *optimizer, const tchi_state *state, const tch_checkpoint *file,
                                  const char *name);

/* Moments: the file's format for this name, possibly sharded; checks the format and the parameter's size; checks that
 * scales of codes exist and match them; reads moment `k` and its scales. */
tch_moments tchi_saved_moments_of(const tchi_param *param, const tch_checkpoint *file, const char *name);
tch_status tchi_saved_moment_check(const tchi_param *param, const tch_checkpoint *file, const char *name);
tch_status tchi_saved_scales_check(const tchi_param *param, const tch_checkpoint *file, const char *name);
tch_status tchi_saved_moment_read(const tch_optimizer *optimizer, const tchi_param *param, int32_t k,
                                  const tch_checkpoint *file, const char *name);

/* --- saved_counts.c ---------------------------------------------------------------------------------------------- */

/* Host counters as a list of int64_t: for each parameter its steps with a gradient, then the optimizer's steps, then
 * for each local factor its failed refreshes. One process stores the list as "counts"; ranks store "P/counts" for each
 * parameter and "P/failures.N" for each tile. */
tch_status tchi_saved_counts_add(tch_optimizer *optimizer, tch_checkpoint_writer *writer, const char *prefix);

/* Checks the length of one process's list, in one process. */
tch_status tchi_saved_counts_check(const tch_optimizer *optimizer, const tch_checkpoint *file, const char *prefix);

/* Reads either form into the list and checks it. */
tch_status tchi_saved_counts_read(const tch_optimizer *optimizer, const tch_checkpoint *file, const char *prefix,
                                  tchi_list *counts);
void tchi_saved_counts_take(tch_optimizer *optimizer, const tchi_list *counts);

/* Whether the checkpoint is sharded. */
bool tchi_saved_by_ranks(const tch_checkpoint *file, const char *prefix);

/* FNV-1a over bytes, and over a number. */
#define TCHI_HASH_BEGIN 0xCBF29CE484222325u
uint64_t tchi_hash(uint64_t hash, const void *data, size_t bytes);
uint64_t tchi_hash_number(uint64_t hash, int64_t number);

/* A hash of what two optimizers must have in common to exchange state: names, shapes, types and groups. */
uint64_t tchi_saved_model(const tch_optimizer *optimizer);

#endif
