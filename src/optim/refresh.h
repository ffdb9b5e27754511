/* Scheduling refreshes, and computing roots. The schedule of an interval balances the cost of its steps. It depends
 * only on the sizes and the interval, so a resumed run follows the same schedule. */
#ifndef TCHI_OPTIM_REFRESH_H
#define TCHI_OPTIM_REFRESH_H

#include "optimizer.h"
#include "rects.h"

/* Marks the factors of the group to refresh in this step; `any`: there are some. Adaptive refresh by norm reads the
 * previous step's norms, so it may wait for that step. */
tch_status tchi_refresh_mark(tch_optimizer *optimizer, const tchi_step *now, int32_t group, bool *any);

/* Which adaptive refresh the group has, if any: by the norms of directions, or by the drift of bases. */
bool tchi_refresh_by_norm(const tch_optimizer *optimizer, const tch_optim_config *config);
bool tchi_refresh_by_drift(const tch_optimizer *optimizer, const tch_optim_config *config);

/* Where the norms of the run's directions belong, for refresh by norm and to apply them. */
double *tchi_refresh_norms(tch_optimizer *optimizer, const tchi_run *run);

/* log2 of the next refresh interval, after an interval of 2^gap at whose end a basis was off by `drift`. */
uint8_t tchi_refresh_next_gap(const tch_optim_config *config, uint8_t gap, double drift);

/* The current refresh interval of a factor, in steps. */
int32_t tchi_refresh_interval(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch, int64_t factor);

/* Whether a factor of the run's blocks is refreshed at this step. */
bool tchi_run_needs_refresh(const tch_optimizer *optimizer, const tchi_run *run);

/* Whether a refresh failed. With eps = 0 a factor of zeros has no root and keeps its current one; that is not a
 * failure. */
static inline bool tchi_refresh_failed(const tch_optim_config *config, int32_t report)
{
    return report != TCH_REPORT_OK && (report != TCH_REPORT_NOT_POSITIVE || config->eps > 0.0);
}

/* The root configuration of a factor batch after this many failed refreshes. */
tch_root_config tchi_refresh_how(const tch_optim_config *config, const tchi_factor_batch *factor_batch,
                                 double relative_eps, int failures);

/* Computes the roots of all marked factors; tchi_outcomes_ask follows. */
tch_status tchi_refresh_roots(tch_optimizer *optimizer, int32_t group);

/* The same for a run's factors along dimension k, for methods whose next factor depends on those roots. Call it between
 * tchi_outcomes_note and tchi_outcomes_ask. */
tch_status tchi_refresh_run_roots(tch_optimizer *optimizer, const tchi_run *run, int32_t k);

/* The step, counted in gradients of the parameter, at which its roots are first computed. */
int64_t tchi_refresh_first(const tch_optim_config *config);

/* Limits the workspace to what is left of the optimizer's budget; pass the result to _restore. */
int64_t tchi_workspace_hold(const tch_optimizer *optimizer);
void tchi_workspace_restore(const tch_optimizer *optimizer, int64_t before);

/* --- outcomes.c -------------------------------------------------------------------------------------------------- */

/* Bits of tchi_factor_batch.unread: the status of a refresh, and the norm of a direction. */
enum { TCHI_UNREAD_STATUS = 1, TCHI_UNREAD_NORM = 2 };

/* Bytes of the status of a factor batch, which begins with the flags; and the position of the drift. */
int64_t tchi_outcome_bytes(const tchi_factor_batch *factor_batch);
double *tchi_outcome_drift(const tchi_factor_batch *factor_batch, int32_t *flags);

/* Reads the status of the latest refresh of the factors to be refreshed. May wait for the previous step's refresh. */
tch_status tchi_outcomes_note(tch_optimizer *optimizer, int32_t group);

/* At the end of a step: queues the copy of the status of its refreshes, and of its norms, to the host. */
tch_status tchi_outcomes_ask(tch_optimizer *optimizer, int32_t group);

/* Reads all pending statuses, for checkpoints. Synchronizes. */
tch_status tchi_outcomes_settle(tch_optimizer *optimizer);

/* Discards the status of earlier refreshes, after failures and intervals have been loaded. */
void tchi_outcomes_forget(tchi_factor_batch *factor_batch, int64_t factor);

/* --- counts.c ---------------------------------------------------------------------------------------------------- */

#define TCHI_MOST_FAILURES 2 /* failed refreshes that change the configuration: see refresh.c */

/* A factor's failures and adaptive schedule as one number, and whether a number is valid. Files of earlier versions
 * contain failures only, or failures and intervals. */
#define TCHI_MOST_FACTOR_COUNT 0x1FFFFFFF
int64_t tchi_factor_count(const tchi_factor_batch *factor_batch, int64_t factor);
bool tchi_is_factor_count(int64_t count);
void tchi_factor_resume(tchi_factor_batch *factor_batch, int64_t factor, int64_t count);

/* From here on consecutive step counts are the same double, the type of the clocks on the device. */
#define TCHI_MOST_STEPS ((int64_t)1 << 53)

/* Whether a clock may have this value: an integer. */
bool tchi_is_clock(double step);

/* Restores a parameter's counters: `steps_seen` steps with a gradient, its clock at `step`. */
void tchi_param_resume(tchi_param *param, int64_t steps_seen, double step);

#endif
