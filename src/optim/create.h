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

#endif
