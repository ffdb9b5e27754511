/* The search for learning rates that --tune asks for. */
#ifndef CLI_TRAIN_TUNE_H
#define CLI_TRAIN_TUNE_H

#include "run/session.h"

/* Tries TRAIN_RATES rates per method, each for the whole number of steps, and leaves the best in the plan. */
enum { TRAIN_RATES = 5 };
int train_tune(train_session *session);

#endif
