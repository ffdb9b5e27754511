/* Checkpoints of a training run, written and resumed. */
#ifndef CLI_TRAIN_CHECKPOINT_H
#define CLI_TRAIN_CHECKPOINT_H

#include <torchium/checkpoint.h>

#include "train/run/session.h"

/* Opens plan->resume and rereads the command line with the checkpoint's settings before the user's. CLI_OK, or said. */
int train_resume_plan(int argc, char **argv, train_plan *plan, tch_checkpoint **checkpoint);

/* Compares settings and data, then takes every run's state from the checkpoint. CLI_OK, or said. */
int train_resume_runs(train_session *session, tch_checkpoint *checkpoint, const char *path);

/* Writes plan->checkpoint with all runs. NULL, or the sentence that says why not. */
const char *train_checkpoint_save(train_session *session);

#endif
