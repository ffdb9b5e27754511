/* Roots that a refresh could not take to the asked tolerance. What became of a refresh lies on the device; it is looked
 * at before the next refresh of the same factor, which then has more damping, or the eigen method. So what follows from
 * a failure depends neither on when somebody asks for statistics nor on when the device happens to be done. */
#ifndef TCHI_OPTIM_FAILURES_H
#define TCHI_OPTIM_FAILURES_H

#include "optimizer.h"

/* Notes how the latest refreshes of factors that are due have ended. May wait for the refresh of the last step. */
tch_status tchi_failures_note(tch_optimizer *optimizer, int32_t group);

/* After a refresh: the host will want to know what became of it. */
tch_status tchi_failures_ask(tch_optimizer *optimizer, int32_t group);

/* Notes all that is not noted yet, for checkpoints: it would be noted in any case. Waits for the device. */
tch_status tchi_failures_settle(tch_optimizer *optimizer);

/* Failures were set from outside: what became of earlier refreshes is forgotten. */
void tchi_failures_forget(tchi_factor_batch *factor_batch, int64_t factor);

#endif
