/* The results of a session: what it shows and the files that it writes. Functions with an exit status have reported the
 * failure themselves. */
#ifndef CLI_TRAIN_RESULTS_H
#define CLI_TRAIN_RESULTS_H

#include <torchium/checkpoint.h>

#include "terminal/progress.h"
#include "train/run/run.h"

/* The saves of checkpoints. One that fails ends nothing: the next one may succeed, and what is missing is reported at
 * the end. */
typedef struct train_saves {
    int64_t failed;       /* since the last one that succeeded */
    const train_run *run; /* the one that was at work at the last save that succeeded, or NULL */
    int64_t step;         /* its step then */
} train_saves;

typedef struct train_session {
    train_setup setup;
    int32_t run_count;
    train_run runs[TRAIN_METHODS];
    progress bar;
    double drawn;    /* when the bar was, last */
    int interrupted; /* the signal by which it was asked to end before the end, or 0 */
    train_saves saves;
} train_session;

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
