/* The plan of a session: what the command line asks for, and the numbers that follow from it. */
#ifndef CLI_TRAIN_PLAN_H
#define CLI_TRAIN_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include <torchium/kfac.h>
#include <torchium/network.h>
#include <torchium/optim.h>

enum { TRAIN_METHODS = 11, TRAIN_HIDDEN = 16, TRAIN_PARAMETERS = 2 * (TRAIN_HIDDEN + 1), TRAIN_TEXT = 256 };

/* What a gradient goes through before the optimizer's step. */
typedef enum train_curvature { TRAIN_PLAIN, TRAIN_KFAC, TRAIN_EKFAC, TRAIN_NATURAL } train_curvature;

typedef struct train_method {
    const char *name;
    tch_optim_kind kind; /* of the step */
    train_curvature curvature;
    double rate, autoencode_rate;           /* the defaults; then `rate` is that of the run */
    void (*suit)(tch_optim_config *config); /* to a small network; NULL where the defaults do */
    bool spares_last;                       /* leaves the last layer's matrix to AdamW */
} train_method;

typedef struct train_plan {
    /* as the options give it */
    const char *data, *label_column;
    const char *task, *optimizer, *lr, *hidden, *activation, *schedule, *fisher;
    const char *device, *plot, *checkpoint, *resume;
    int64_t samples, seed, batch, steps, epochs, warmup, threads;
    int64_t precondition_frequency, block; /* 0: each optimizer's own */
    int64_t log_every, checkpoint_every;   /* 0: steps / 50; never but at the end */
    double test_fraction, weight_decay;
    double damping, kl_clip; /* below 0: each method's own */
    double per_sample_clip;  /* 0: none */
    bool json;
    /* read from it */
    int32_t method_count, hidden_count;
    train_method methods[TRAIN_METHODS];
    int64_t widths[TRAIN_HIDDEN];
    tch_activation f;
    bool autoencode;                                   /* the task: to reproduce the inputs */
    bool cosine, empirical;                            /* the rate's schedule; KFAC's factors from the data's labels */
    char hidden_text[TRAIN_TEXT], lr_text[TRAIN_TEXT]; /* the same in one spelling */
} train_plan;

/* What decides the course of a run, as options and their values: what a checkpoint keeps. */
typedef struct train_setting {
    const char *option; /* "--hidden" */
    char text[4096];    /* empty where the option was not given */
    bool free;          /* may change when a run is resumed */
    bool path;          /* of a file that is read: only the command line names it */
} train_setting;
enum { TRAIN_SETTINGS = 22 };

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

/* An optimizer's configuration: its defaults, what the options say, and what suits a small network (plan.c). */
tch_optim_config train_plan_config(const train_plan *plan, const train_method *method);

/* The same for KFAC, the damping of it and of the natural gradient, and the steps from one refresh to the next. */
tch_kfac_config train_plan_kfac(const train_plan *plan, train_curvature kind);
double train_plan_damping(const train_plan *plan, train_curvature kind);
int64_t train_plan_frequency(const train_plan *plan);

/* The learning rate of a step, from 0, as a share of the method's. */
double train_plan_schedule(const train_plan *plan, int64_t step);

#endif
