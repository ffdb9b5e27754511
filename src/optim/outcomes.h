/* What became of refreshes: which roots could not be taken to the asked tolerance, and how far factors had drifted from
 * their roots or bases. It lies on the device, and is looked at before the next refresh of the same factor, which then
 * has more damping, or the eigen method, or comes sooner or later than the last. So what follows from it depends
 * neither on when somebody asks for statistics nor on when the device happens to be done. */
#ifndef TCHI_OPTIM_OUTCOMES_H
#define TCHI_OPTIM_OUTCOMES_H

#include "optimizer.h"

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

#endif
