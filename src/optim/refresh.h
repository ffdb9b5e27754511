/* When factors are refreshed, and the refresh of roots. The plan of a period spreads the work over its steps; it
 * depends on the sizes and the period alone, so a training that is resumed follows the same plan. */
#ifndef TCHI_OPTIM_REFRESH_H
#define TCHI_OPTIM_REFRESH_H

#include "optimizer.h"
#include "rects.h"

/* Assigns every factor of the group a step of the period, so that steps cost about the same. For benchmarks, too. */
void tchi_refresh_plan(tch_optimizer *optimizer, int32_t group, int32_t period);

/* Marks the factors of the group to refresh at this step; false when there are none. */
bool tchi_refresh_mark(tch_optimizer *optimizer, const tchi_step *now, int32_t group);

/* Whether factors are refreshed adaptively. */
bool tchi_refresh_by_need(const tch_optim_config *config);

/* How many steps, as a power of two, lie between refreshes from now on, where they were 2^gap and the last one found a
 * root or basis off by `drift`. */
uint8_t tchi_refresh_next_gap(const tch_optim_config *config, uint8_t gap, double drift);

/* How many steps lie between two refreshes of a factor, as scheduled now. */
int32_t tchi_refresh_interval(const tch_optim_config *config, const tchi_factor_batch *factor_batch, int64_t factor);

/* Whether a factor of the run's blocks is refreshed at this step. */
bool tchi_run_needs_refresh(const tch_optimizer *optimizer, const tchi_run *run);

/* Whether a refresh failed. Without eps a factor of zeros has no root, and keeps the one it has: no failure. */
static inline bool tchi_refresh_failed(const tch_optim_config *config, int32_t report)
{
    return report != TCH_REPORT_OK && (report != TCH_REPORT_NOT_POSITIVE || config->eps > 0.0);
}

/* How the roots of a factor batch are taken from factors whose last refreshes failed so many times. */
tch_root_config tchi_refresh_how(const tch_optim_config *config, const tchi_factor_batch *factor_batch,
                                 double relative_eps, int failures);

/* Takes the roots of all marked factors. */
tch_status tchi_refresh_roots(tch_optimizer *optimizer, int32_t group);

/* The same for a run's factors along dimension k, for methods whose next factor depends on those roots: between
 * tchi_outcomes_note and tchi_outcomes_ask. */
tch_status tchi_refresh_run_roots(tch_optimizer *optimizer, const tchi_run *run, int32_t k);

/* The step, counted by a parameter's gradients, at which its first roots are taken. */
int64_t tchi_refresh_first(const tch_optim_config *config);

/* Makes the workspace stay within what the optimizer's budget leaves for it; give the result back to _restore. */
int64_t tchi_workspace_hold(const tch_optimizer *optimizer);
void tchi_workspace_restore(const tch_optimizer *optimizer, int64_t before);

/* --- outcomes.c -------------------------------------------------------------------------------------------------- */

/* Memory for the outcomes of a factor batch, which begins with the flags; and where its drift is in that. */
int64_t tchi_outcome_bytes(const tchi_factor_batch *factor_batch);
double *tchi_outcome_drift(const tchi_factor_batch *factor_batch, int32_t *flags);

/* Notes how the latest refreshes of factors to be refreshed have ended. May wait for the refresh of the last step. */
tch_status tchi_outcomes_note(tch_optimizer *optimizer, int32_t group);

/* After a refresh: the host will want to know what became of it. */
tch_status tchi_outcomes_ask(tch_optimizer *optimizer, int32_t group);

/* Notes all that is not noted yet, for checkpoints: it would be noted in any case. Waits for the device. */
tch_status tchi_outcomes_settle(tch_optimizer *optimizer);

/* Failures and gaps were set from outside: what became of earlier refreshes is forgotten. */
void tchi_outcomes_forget(tchi_factor_batch *factor_batch, int64_t factor);

/* --- counts.c ---------------------------------------------------------------------------------------------------- */

#define TCHI_MOST_FAILURES 2 /* failed refreshes of a factor that make a difference: see refresh.c */

/* What is kept of a factor, as one number: its failures, and the gaps of adaptive refreshes. One that is not such a
 * number says false. Files of earlier versions have failures alone. */
#define TCHI_MOST_FACTOR_COUNT 0xFFF
int64_t tchi_factor_count(const tchi_factor_batch *factor_batch, int64_t factor);
bool tchi_is_factor_count(int64_t count);
void tchi_factor_resume(tchi_factor_batch *factor_batch, int64_t factor, int64_t count);

/* Steps are counted here and, as a double, by the clocks on the device: above this a step and the next are the same. */
#define TCHI_MOST_STEPS ((int64_t)1 << 53)

/* Whether a clock can stand there: at a whole number of steps. */
bool tchi_is_clock(double step);

/* Puts a parameter where it was after `steps_seen` steps with a gradient, its clock at `step`. */
void tchi_param_resume(tchi_param *param, int64_t steps_seen, double step);

#endif
