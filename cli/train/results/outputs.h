/* The files that a training run writes. */
#ifndef CLI_TRAIN_OUTPUTS_H
#define CLI_TRAIN_OUTPUTS_H

#include "train/run/session.h"

/* Whether the files that the plan names can be written, as far as that can be told before there is anything to write,
 * and none of them is one that is read. CLI_OK, or said. */
int train_outputs_check(const train_plan *plan);

/* Saves the checkpoint, if one was asked for, while `run` is at work. When that fails it is said, once until one
 * succeeds again, and counted. */
void train_outputs_save(train_session *session, const train_run *run);

/* Draws the picture, if one was asked for, and says which files are missing in the end. CLI_OK where none is. */
int train_outputs_finish(const train_session *session);

#endif
