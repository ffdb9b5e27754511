/* The results of a session: what it shows and the files that it writes. Functions with an exit status have reported the
 * failure themselves. */
#ifndef CLI_TRAIN_RESULTS_H
#define CLI_TRAIN_RESULTS_H

#include <torchium/checkpoint.h>

#include "train/run/session.h"

/* --- on the terminal (report.c) ---------------------------------------------------------------------------------- */

void train_report_start(const train_session *session);

/* A measurement: a line of JSON, or now and then one of text. */
void train_report_point(train_session *session, const train_run *run, const train_point *point);

/* Moves the bar, if there is one and it was not moved a moment ago. */
void train_report_progress(train_session *session, const train_run *run);

/* The table, or the last line of JSON. */
void train_report_end(train_session *session);

/* --- files (outputs.c, plot.c) ----------------------------------------------------------------------------------- */

/* Whether the files that the plan names can be written, as far as that is known before there is anything to write, and
 * none of them is an input. */
int train_outputs_check(const train_plan *plan);

/* Saves the checkpoint, if one was asked for, while `run` is at work. A failure is reported once until a save succeeds
 * again, and counted. */
void train_outputs_save(train_session *session, const train_run *run);

/* Draws the picture, if one was asked for, and reports which files are missing in the end. CLI_OK where none is. */
int train_outputs_finish(const train_session *session);

/* Writes plan->plot. */
int train_plot(const train_session *session);

/* --- checkpoints (checkpoint.c) ---------------------------------------------------------------------------------- */

/* Opens plan->resume and rereads the command line with the checkpoint's settings before the user's. */
int train_resume_plan(int argc, char **argv, train_plan *plan, tch_checkpoint **checkpoint);

/* Compares settings and data, then takes every run's state from the checkpoint. */
int train_resume_runs(train_session *session, tch_checkpoint *checkpoint, const char *path);

/* Writes plan->checkpoint with all runs. NULL, or the sentence that says why not. */
const char *train_checkpoint_save(train_session *session);

#endif
