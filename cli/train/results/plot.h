/* The picture of a training run. */
#ifndef CLI_TRAIN_PLOT_H
#define CLI_TRAIN_PLOT_H

#include "train/run/session.h"

/* Writes plan->plot. CLI_OK, or said. */
int train_plot(const train_session *session);

#endif
