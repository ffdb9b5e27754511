/* The results of a session: output and files. Functions with an exit status have reported the failure. */
#ifndef CLI_TRAIN_RESULTS_H
#define CLI_TRAIN_RESULTS_H

#include <torchium/checkpoint.h>

#include "terminal/progress.h"
#include "train/run/run.h"

/* Counts saves of checkpoints. A failed one stops nothing; a later one may succeed, and missing files are reported at
 * the end. */
typedef struct train_saves {
    int64_t failed;       /* since the last success */
    const train_run *run; /* the current run at the last success, or NULL */
    int64_t step;         /* its step at that time */
} train_saves;

typedef struct train_session {
    train_setup setup;
    int32_t run_count;
    train_run runs[TRAIN_METHODS];
    progress bar;
    double drawn;    /* last time the bar was drawn */
    int interrupted; /* the signal that requested a stop, or 0 */
    train_saves saves;
} train_session;

/* --- on the terminal (report.c) ---------------------------------------------------------------------------------- */

void train_report_start(const train_session *session);

/* Reports a measurement: a line of JSON, or sometimes one of text. */
void train_report_point(train_session *session, const train_run *run, const train_point *point);

/* Updates the bar, if there is one and TICK has passed. */
void train_report_progress(train_session *session, const train_run *run);

/* Prints the table, or the last line of JSON. */
void train_report_end(train_session *session);

/* --- files (outputs.c, plot.c) ----------------------------------------------------------------------------------- */

/* Checks, as far as possible in advance, that the files of the plan can be written and that none is an input. */
int train_outputs_check(const train_plan *plan);

/* Saves the checkpoint, if requested; `run` is the current one. Failures are counted, and reported once until a save
 * succeeds. */
void train_outputs_save(train_session *session, const train_run *run);

/* Draws the picture, if requested, and reports missing files. CLI_OK if none is missing. */
int train_outputs_finish(const train_session *session);

/* Writes plan->plot. */
int train_plot(const train_session *session);

/* --- checkpoints (checkpoint.c) ---------------------------------------------------------------------------------- */

/* Opens plan->resume and rereads the command line with the checkpoint's settings before the user's. */
int train_resume_plan(int argc, char **argv, train_plan *plan, tch_checkpoint **checkpoint);

/* Compares settings and data, then loads the state of every run. */
int train_resume_runs(train_session *session, tch_checkpoint *checkpoint, const char *path);

/* Writes plan->checkpoint with all runs. NULL, or the error message. */
const char *train_checkpoint_save(train_session *session);

#endif
