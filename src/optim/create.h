/* The stages of creating an optimizer. A forecast runs only the first. */
#ifndef TCHI_OPTIM_CREATE_H
#define TCHI_OPTIM_CREATE_H

#include "optimizer.h"

/* The setup with its defaults, without a group of one rank that holds everything. */
tch_optim_setup tchi_setup_of(const tch_optim_setup *setup, int32_t count, const tch_parameter *parameters);

/* Validates configuration and parameters; the tensors' memory only if `with_data`. */
tch_status tchi_optim_check(const tch_context *context, const char *function, const tch_optim_config *config,
                            int32_t count, const tch_parameter *parameters, bool with_data);

/* Initializes an optimizer without groups. */
void tchi_optim_prepare(tch_optimizer *optimizer, tch_context *context, const tch_optim_config *config,
                        const tch_state_allocator *allocator);

/* Adds a group and its layout, without device memory. */
tch_status tchi_optim_plan(tch_optimizer *optimizer, const tch_optim_config *config, int32_t count,
                           const tch_parameter *parameters, const tch_placement *placements, bool with_data);

/* Sets the merged dimensions of a whole parameter and its division into matrices; *blocked is set if it has blocks. */
tch_status tchi_optim_set_dims(const tch_optimizer *optimizer, tchi_param *param, const tch_parameter *parameter,
                               int32_t ndim, const int64_t *shape, tchi_dims *dims, bool *blocked);

/* The minimum workspace to refresh any one factor, including the pool's rounding, and the workspace to refresh all at
 * once within the budget: see forecast.c. */
tch_status tchi_forecast_refresh(const tch_optimizer *optimizer, int64_t *least, int64_t *most);

/* Frees everything but the struct itself. */
void tchi_optim_empty(tch_optimizer *optimizer);

/* --- layout.c: from a list of parameters to blocks, block batches and factor batches, and their memory. Runs on the
 * host and allocates no device memory. */

tch_status tchi_layout_group(tch_optimizer *optimizer, int32_t group);

/* Lays out the group's state in one arena and its other buffers in another, and lists the state by name. Runs twice:
 * first with arenas that only measure. */
tch_status tchi_layout_state(tch_optimizer *optimizer, int32_t group, tchi_arena *state, tchi_arena *beside,
                             bool names);

/* The largest side of a block. */
int64_t tchi_layout_cut_at(const tch_optimizer *optimizer, int32_t group);

/* How the moments of a parameter, or of a tile of it, are kept: by its group's state_dtype. Of matrices that is the
 * first moment; in bfloat16 where a row of a block would cut codes. */
tch_moments tchi_moments_of(const tch_optimizer *optimizer, const tchi_param *param);

/* Sets the chunk of each block batch, and its scratch. */
void tchi_layout_chunks(tch_optimizer *optimizer, tchi_arena *scratch);

/* Bytes a step may use beyond the state. */
int64_t tchi_layout_budget(const tch_optimizer *optimizer);

/* Frees the host arrays of a factor batch. */
void tchi_layout_free_factor_batch(tchi_factor_batch *factor_batch);

#endif
