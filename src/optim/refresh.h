/* When factors are refreshed, and the refresh of roots. The plan of a period spreads the work over its steps; it
 * depends on the sizes and the period alone, so a training that is resumed follows the same plan. */
#ifndef TCHI_OPTIM_REFRESH_H
#define TCHI_OPTIM_REFRESH_H

#include "optimizer.h"
#include "rects.h"

/* Assigns every factor of the group a step of the period, so that steps cost about the same. */
void tchi_refresh_plan(tch_optimizer *optimizer, int32_t group, int32_t period);

/* Marks the factors of the group to refresh at this step; false when there are none. */
bool tchi_refresh_mark(tch_optimizer *optimizer, const tchi_step *now, int32_t group);

/* Whether factors are refreshed by need. */
bool tchi_refresh_by_need(const tch_optim_config *config);

/* How many steps, as a power of two, lie between refreshes from now on, where they were 2^gap and the last one found a
 * root or basis off by `drift`. */
uint8_t tchi_refresh_next_gap(const tch_optim_config *config, uint8_t gap, double drift);

/* Whether a factor of the run's blocks is refreshed at this step. */
bool tchi_run_needs_refresh(const tch_optimizer *optimizer, const tchi_run *run);

/* How the roots of a factor batch are taken from factors whose last refreshes failed so many times. */
tch_root_config tchi_refresh_how(const tch_optim_config *config, const tchi_factor_batch *factor_batch,
                                 double relative_eps, int failures);

/* Takes the roots of all marked factors. */
tch_status tchi_refresh_roots(tch_optimizer *optimizer, int32_t group);

/* The step, counted by a parameter's gradients, at which its first roots are taken. */
int64_t tchi_refresh_first(const tch_optim_config *config);

/* Makes the workspace stay within what the optimizer's budget leaves for it; give the result back to _restore. */
int64_t tchi_workspace_hold(const tch_optimizer *optimizer);
void tchi_workspace_restore(const tch_optimizer *optimizer, int64_t before);

#endif
