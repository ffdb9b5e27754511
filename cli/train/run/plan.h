/* The plan of a session: the command line and values derived from it. */
#ifndef CLI_TRAIN_PLAN_H
#define CLI_TRAIN_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include <torchium/kfac.h>
#include <torchium/network.h>
#include <torchium/optim.h>

enum { TRAIN_METHODS = 11, TRAIN_HIDDEN = 16, TRAIN_PARAMETERS = 2 * (TRAIN_HIDDEN + 1), TRAIN_TEXT = 256 };

/* Preconditioning of a gradient before the optimizer's step. */
typedef enum train_curvature { TRAIN_PLAIN, TRAIN_KFAC, TRAIN_EKFAC, TRAIN_NATURAL } train_curvature;

typedef struct train_method {
    const char *name;
    tch_optim_kind kind; /* of the step */
    train_curvature curvature;
    double rate, autoencode_rate;           /* the defaults; later `rate` is that of the run */
    void (*suit)(tch_optim_config *config); /* adjusts the defaults to a small network; may be NULL */
    bool spares_last;                       /* AdamW updates the last layer's matrix */
} train_method;

typedef struct train_plan {
    /* as given by the options */
    const char *data, *label_column;
    const char *task, *optimizer, *lr, *hidden, *activation, *schedule, *fisher;
    const char *device, *plot, *checkpoint, *resume;
    int64_t samples, seed, batch, steps, epochs, warmup, threads;
    int64_t precondition_frequency, block; /* 0: the optimizer's default */
    int64_t log_every, checkpoint_every;   /* 0: steps / 50; only at the end */
    double test_fraction, weight_decay;
    double damping, kl_clip; /* below 0: the method's default */
    double per_sample_clip;  /* 0: none */
    bool json;
    /* derived */
    int32_t method_count, hidden_count;
    train_method methods[TRAIN_METHODS];
    int64_t widths[TRAIN_HIDDEN];
    tch_activation f;
    bool autoencode;                                   /* the task */
    bool cosine, empirical;                            /* the rate's schedule; KFAC's factors from the data's labels */
    char hidden_text[TRAIN_TEXT], lr_text[TRAIN_TEXT]; /* normalized */
} train_plan;

/* The options that determine a run, which a checkpoint stores. */
typedef struct train_setting {
    const char *option; /* "--hidden" */
    char text[4096];    /* empty if not given */
    bool free;          /* may change on resume */
    bool path;          /* an input file: never read from a checkpoint */
} train_setting;
enum { TRAIN_SETTINGS = 22 };

/* Reads the command line: CLI_OK, or the status of a reported error. *go is false after --help. */
int train_plan_read(int argc, char **argv, train_plan *plan, bool *go);

/* Parses the words of the plan. Reports errors. */
int train_plan_parse(train_plan *plan);

/* Sets what depends on the number of training rows: batch, steps, distance between measurements. Reports too many
 * steps. */
int train_plan_settle(train_plan *plan, int64_t rows);

/* The settings of a settled plan. */
void train_plan_settings(const train_plan *plan, train_setting settings[TRAIN_SETTINGS]);

/* An optimizer's configuration: its defaults, the options, and adjustments to a small network. */
tch_optim_config train_plan_config(const train_plan *plan, const train_method *method);

/* The same for KFAC; the damping of KFAC and the natural gradient; steps between refreshes. */
tch_kfac_config train_plan_kfac(const train_plan *plan, train_curvature kind);
double train_plan_damping(const train_plan *plan, train_curvature kind);
int64_t train_plan_frequency(const train_plan *plan);

/* The learning rate of a step, from 0, relative to the method's. */
double train_plan_schedule(const train_plan *plan, int64_t step);

#endif
