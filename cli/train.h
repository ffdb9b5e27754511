/* `torchium train`, in parts: the plan is what the command line asks for, the data what is trained on, a run one
 * optimizer's training, and the session all of them together. Runs see the same first weights and the same batches;
 * what differs is the optimizer and its rate. */
#ifndef CLI_TRAIN_H
#define CLI_TRAIN_H

#include <stdbool.h>
#include <stdint.h>

#include <torchium/checkpoint.h>
#include <torchium/kfac.h>
#include <torchium/network.h>
#include <torchium/optim.h>
#include <torchium/torchium.h>

#include "dataset.h"
#include "progress.h"

/* --- the plan (train_plan.c) -------------------------------------------------------------------------------------- */

enum { TRAIN_METHODS = 10, TRAIN_HIDDEN = 16, TRAIN_PARAMETERS = 2 * (TRAIN_HIDDEN + 1), TRAIN_TEXT = 256 };

/* What a gradient goes through before the optimizer's step. */
typedef enum train_curvature { TRAIN_PLAIN, TRAIN_KFAC, TRAIN_EKFAC, TRAIN_NATURAL } train_curvature;

typedef struct train_method {
    const char *name;
    tch_optim_kind kind; /* of the step */
    train_curvature curvature;
    double rate;
    void (*suit)(tch_optim_config *config); /* to a small network; NULL where the defaults do */
    bool spares_last;                       /* leaves the last layer's matrix to AdamW */
} train_method;

typedef struct train_plan {
    /* as the options give it */
    const char *data, *images, *labels, *label_column;
    const char *optimizer, *lr, *hidden, *activation, *schedule, *fisher;
    const char *device, *plot, *checkpoint, *resume;
    int64_t samples, seed, batch, steps, epochs, warmup, threads;
    int64_t precondition_frequency, block; /* 0: each optimizer's own */
    int64_t log_every, checkpoint_every;   /* 0: steps / 50; never but at the end */
    double test_fraction, weight_decay;
    double damping, kl_clip; /* below 0: each method's own */
    double per_sample_clip;  /* 0: none */
    bool tune, json;
    /* read from it */
    int32_t method_count, hidden_count;
    train_method methods[TRAIN_METHODS];
    int64_t widths[TRAIN_HIDDEN];
    tch_activation f;
    bool cosine, empirical;                            /* the rate's schedule; KFAC's factors from the data's labels */
    char hidden_text[TRAIN_TEXT], lr_text[TRAIN_TEXT]; /* the same in one spelling */
} train_plan;

/* What decides the course of a training, as options and their values: what a checkpoint keeps. */
typedef struct train_setting {
    const char *option; /* "--hidden" */
    char text[4096];    /* empty where the option was not given */
    bool free;          /* may be another when a training is taken up again */
} train_setting;
enum { TRAIN_SETTINGS = 23 };

/* Reads the command line: CLI_OK, or the exit status of a failure that has been said. *go is false where the help was
 * asked for. */
int train_plan_read(int argc, char **argv, train_plan *plan, bool *go);

/* Turns the words of the plan into numbers. Also said when wrong. */
int train_plan_parse(train_plan *plan);

/* Fills in what depends on the number of training rows: the batch, the steps, the distance between measurements. Said
 * where that makes too many steps. */
int train_plan_settle(train_plan *plan, int64_t rows);

/* The settings of a settled plan. */
void train_plan_settings(const train_plan *plan, train_setting settings[TRAIN_SETTINGS]);

/* Writes the methods' rates into lr_text, after a change of theirs. */
void train_plan_spell_rates(train_plan *plan);

/* An optimizer's configuration: its defaults, what the options say, and what suits a small network (train_plan.c). */
tch_optim_config train_plan_config(const train_plan *plan, const train_method *method);

/* The same for KFAC, the damping of it and of the natural gradient, and the steps from one refresh to the next. */
tch_kfac_config train_plan_kfac(const train_plan *plan, const train_method *method);
double train_plan_damping(const train_plan *plan, const train_method *method);
int64_t train_plan_frequency(const train_plan *plan);

/* The learning rate of a step, from 0, as a share of the method's. */
double train_plan_schedule(const train_plan *plan, int64_t step);

/* --- the data (train_data.c) -------------------------------------------------------------------------------------- */

/* Rows on the device, with their labels. */
typedef struct train_rows {
    tch_tensor *inputs; /* [rows, cols] float32 */
    tch_tensor *labels; /* [rows] int32 */
} train_rows;

/* Consecutive rows of a train_rows: views and the shapes they point to. Not to be copied. */
typedef struct train_batch {
    int64_t input_shape[2], label_shape[1];
    tch_tensor inputs, labels;
} train_batch;

typedef struct train_data {
    dataset train, test;  /* host memory, standardized */
    uint64_t fingerprint; /* of the rows as they were read */
    train_rows test_rows; /* on the device from the beginning to the end */
    train_rows sample;    /* training rows whose loss is measured: all, or as many as TRAIN_SAMPLE */
    train_rows epoch;     /* the training rows in the order of epoch `epoch_number` */
    int64_t epoch_number; /* -1 before the first */
    int64_t *order;
    float *features; /* one epoch's, in its order, on the way to the device */
    int32_t *labels;
} train_data;
enum { TRAIN_SAMPLE = 4096 };

/* Reads or draws the data set and deals it out. CLI_OK, or said. */
int train_data_load(const train_plan *plan, train_data *data);
int train_data_upload(tch_context *context, train_data *data);
void train_data_release(train_data *data);

/* `count` rows from `first` on. */
void train_data_view(const train_rows *rows, int64_t first, int64_t count, train_batch *batch);

/* The batch of a step, from 0. Every epoch has its own order, which depends on the seed and its number alone, so that
 * a training can be taken up at any step. Rows that do not fill a batch are left out of their epoch. */
tch_status train_data_batch(tch_context *context, train_data *data, const train_plan *plan, int64_t step,
                            train_batch *batch);

/* --- runs and the session (train_run.c, train.c) ------------------------------------------------------------------ */

typedef struct train_point {
    int64_t step;
    double seconds; /* of training alone, without measurements and checkpoints */
    double train_loss, test_loss, test_accuracy;
} train_point;
enum { TRAIN_POINT_NUMBERS = 5 };

typedef struct train_run {
    train_method method;
    tch_network *network;
    tch_optimizer *optimizer;
    const tch_tensor *gradients[TRAIN_PARAMETERS];
    tch_kfac *kfac;                      /* of kfac and ekfac */
    tch_tensor *shares;                  /* [batch], with --per-sample-clip: what is left of each sample's gradient */
    tch_tensor *gram, *weights, *report; /* of natural: [batch, batch], [batch], [] */
    int64_t step;
    double seconds;
    bool diverged;       /* its loss is no number any more; it goes no further */
    train_point *points; /* the measurements so far */
    int64_t point_count, point_room;
} train_run;

/* How the saving of checkpoints has gone. A save that fails ends nothing: the next one may succeed, and what is missing
 * in the end is said there. */
typedef struct train_saves {
    int64_t failed;       /* since the last one that succeeded */
    const train_run *run; /* the one that was at work at the last save that succeeded, or NULL */
    int64_t step;         /* its step then */
} train_saves;

typedef struct train_session {
    train_plan plan;
    train_data data;
    tch_context *context;
    tch_tensor *totals; /* what calls of the network add to */
    int32_t run_count;
    train_run runs[TRAIN_METHODS];
    progress bar;
    double drawn;    /* when the bar was, last */
    int interrupted; /* the signal by which it was asked to end before the end, or 0 */
    train_saves saves;
} train_session;

tch_status train_run_create(train_session *session, const train_method *method, train_run *run);
void train_run_destroy(train_run *run);

/* Steps up to `until`, or to the next one after somebody asked to stop. Waits for the device; the time is counted. */
tch_status train_run_advance(train_session *session, train_run *run, int64_t until);

/* Measures losses and accuracy as they are now, on the rows kept for that. */
tch_status train_run_measure(train_session *session, train_run *run, train_point *point);

/* Keeps a measurement; false when there is no memory for it. A loss that is no number marks the run as diverged. */
bool train_run_record(train_run *run, const train_point *point);

/* The mean loss over the training rows kept for measuring: what --tune compares. */
tch_status train_run_loss(train_session *session, train_run *run, double *loss);

/* The run's first measurement with at most this training loss, or NULL. */
const train_point *train_run_reach(const train_run *run, double loss);

/* The latest measurement, or NULL before the first. */
const train_point *train_run_last(const train_run *run);

/* AdamW's run, or else the last one: what the others are compared with. */
const train_run *train_session_baseline(const train_session *session);

/* Tries TRAIN_RATES rates per method, each for the whole number of steps, and leaves the best in the plan. */
enum { TRAIN_RATES = 5 };
int train_tune(train_session *session);

/* --- single samples and curvature (train_curvature.c) ------------------------------------------------------------- */

/* What the run's method and --per-sample-clip need beside the optimizer; destroyed also after a failure. */
tch_status train_curvature_create(const train_session *session, train_run *run);
void train_curvature_destroy(train_run *run);

/* Turns the gradients of the batch at hand into those that the optimizer gets; `rate` is the step's. */
tch_status train_curvature_apply(const train_session *session, train_run *run, double rate);

/* Bytes of KFAC's state. */
int64_t train_curvature_bytes(const train_run *run);

/* --- checkpoints (train_checkpoint.c) ----------------------------------------------------------------------------- */

/* Opens plan->resume and rereads the command line with the checkpoint's settings before the user's. CLI_OK, or said. */
int train_resume_plan(int argc, char **argv, train_plan *plan, tch_checkpoint **checkpoint);

/* Compares settings and data, then takes every run's state from the checkpoint. CLI_OK, or said. */
int train_resume_runs(train_session *session, tch_checkpoint *checkpoint, const char *path);

/* Writes plan->checkpoint with all runs. NULL, or the sentence that says why not. */
const char *train_checkpoint_save(train_session *session);

/* --- files to write (train_outputs.c) ----------------------------------------------------------------------------- */

/* Whether the files that the plan names can be written, as far as that can be told before there is anything to write, and
 * none of them is one that is read. CLI_OK, or said. */
int train_outputs_check(const train_plan *plan);

/* Saves the checkpoint, if one was asked for, while `run` is at work. When that fails it is said, once until one
 * succeeds again, and counted. */
void train_outputs_save(train_session *session, const train_run *run);

/* Draws the picture, if one was asked for, and says which files are missing in the end. CLI_OK where none is. */
int train_outputs_finish(const train_session *session);

/* --- what is shown (train_report.c, train_plot.c) ----------------------------------------------------------------- */

void train_report_start(const train_session *session);

/* A measurement: a line of JSON, or now and then one of text. */
void train_report_point(train_session *session, const train_run *run, const train_point *point);

/* Moves the bar, if there is one and it was not moved a moment ago. */
void train_report_progress(train_session *session, const train_run *run);

/* One rate tried by --tune, and the one chosen. */
void train_report_trial(train_session *session, const train_method *method, double loss);
void train_report_choice(train_session *session, const train_method *method, bool at_edge);

/* The table, or the last line of JSON. */
void train_report_end(train_session *session);

/* Writes plan->plot. CLI_OK, or said. */
int train_plot(const train_session *session);

/* --- stopping (train_stop.c) -------------------------------------------------------------------------------------- */

/* From now on SIGINT, SIGTERM and SIGHUP ask the training to stop after the step at hand; the second one ends the
 * process. Those that are ignored stay ignored. */
void train_stop_watch(void);

/* The signal that asked, or 0. */
int train_stop_asked(void);

#endif
