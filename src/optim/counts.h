/* What the host keeps for a step beside the state on the device, as checkpoints and callers see it. */
#ifndef TCHI_OPTIM_COUNTS_H
#define TCHI_OPTIM_COUNTS_H

#include "optimizer.h"

#define TCHI_MOST_FAILURES 2 /* failed refreshes of a factor that make a difference: see refresh.c */

/* What is kept of a factor, as one number: its failures, and the gaps of refreshes by need. One that is not such a
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
