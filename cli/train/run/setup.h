/* What all runs of a session share: the same plan, the same data, and where they compute. */
#ifndef CLI_TRAIN_SETUP_H
#define CLI_TRAIN_SETUP_H

#include <torchium/torchium.h>

#include "data.h"
#include "plan.h"

typedef struct train_setup {
    train_plan plan;
    train_data data;
    tch_context *context;
    tch_tensor *totals; /* what calls of the network add to */
} train_setup;

#endif
