/* From a list of parameters to blocks, block batches and factor batches, and from these to memory. Everything here is
 * bookkeeping on the host and can be done without allocating any of the memory it counts, which is what a forecast
 * does. */
#ifndef TCHI_OPTIM_LAYOUT_H
#define TCHI_OPTIM_LAYOUT_H

#include "optimizer.h"

/* Sorts the group's parameters, already in the optimizer's list, into blocks, block batches and factor batches. */
tch_status tchi_layout_group(tch_optimizer *optimizer, int32_t group);

/* Places the group's state in one arena and what it keeps beside the state in another, and lists the state by name.
 * Runs twice: first with arenas that only measure. */
tch_status tchi_layout_state(tch_optimizer *optimizer, int32_t group, tchi_arena *state, tchi_arena *beside,
                             bool names);

/* The largest side of a block. */
int64_t tchi_layout_cut_at(const tch_optimizer *optimizer, int32_t group);

/* How many blocks of each block batch a pass works on at once, and its scratch. */
void tchi_layout_chunks(tch_optimizer *optimizer, tchi_arena *scratch);

/* What a step may take beyond the state. */
int64_t tchi_layout_budget(const tch_optimizer *optimizer);

/* Host memory of a factor batch that tchi_list_free does not know of. */
void tchi_layout_free_factor_batch(tchi_factor_batch *factor_batch);

#endif
