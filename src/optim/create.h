/* The steps in which an optimizer is made, for those who want only some of them: a forecast plans one and drops it. */
#ifndef TCHI_OPTIM_CREATE_H
#define TCHI_OPTIM_CREATE_H

#include "optimizer.h"

/* Configuration and parameters, all that can be wrong with them; the tensors' memory only `with_data`. */
tch_status tchi_optim_check(const tch_context *context, const char *function, const tch_optim_config *config,
                            int32_t count, const tch_parameter *parameters, bool with_data);

/* An optimizer without groups. */
void tchi_optim_prepare(tch_optimizer *optimizer, tch_context *context, const tch_optim_config *config,
                        const tch_state_allocator *allocator);

/* Adds a group and all that follows from its parameters, short of memory on the device. */
tch_status tchi_optim_plan(tch_optimizer *optimizer, const tch_optim_config *config, int32_t count,
                           const tch_parameter *parameters, const tch_placement *placements, bool with_data);

/* The dimensions of a whole parameter of this shape, merged as the method wants them, and how it is cut into several
 * matrices; *blocked: it has blocks. */
tch_status tchi_optim_set_dims(const tch_optimizer *optimizer, tchi_param *param, const tch_parameter *parameter,
                               int32_t ndim, const int64_t *shape, tchi_dims *dims, bool *blocked);

/* The least workspace with which every factor can be refreshed, the pool's rounding included, and what a refresh of all
 * of them at once takes within the budget: see forecast.c. */
tch_status tchi_forecast_refresh(const tch_optimizer *optimizer, int64_t *least, int64_t *most);

/* Frees everything but the struct itself. */
void tchi_optim_empty(tch_optimizer *optimizer);

/* --- layout.c: from a list of parameters to blocks, block batches and factor batches, and from these to memory. Done
 * on the host, without any of the memory it counts. */

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
