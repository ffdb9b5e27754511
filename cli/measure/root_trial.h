/* One batch of inverse roots to be taken and judged, as the demonstration and the benchmark do. */
#ifndef CLI_ROOT_TRIAL_H
#define CLI_ROOT_TRIAL_H

#include <math.h>

#include <torchium/torchium.h>

#include "workplace.h"

typedef struct root_trial {
    const tch_tensor *a; /* [batch, n, n], not owned */
    int32_t root;
    tch_root_config config;
    tch_tensor *out;
    tch_tensor *residual;
    tch_tensor *report;
} root_trial;

/* What became of a batch. */
typedef struct root_verdict {
    int64_t failed;    /* matrices without a result */
    tch_report reason; /* of the first of them */
    double residual;   /* the largest certificate of the others */
    double error;      /* the largest relative Frobenius error of the others, NaN if nothing was compared */
} root_verdict;

/* Nothing judged yet. */
#define ROOT_VERDICT_NONE ((root_verdict){0, TCH_REPORT_OK, (double)NAN, (double)NAN})

/* Outputs for the matrices `a`; root and config are set by the caller. */
tch_status root_trial_start(const workplace *place, const tch_tensor *a, root_trial *trial);
void root_trial_end(root_trial *trial);

/* A timed_call; `user` is the root_trial. */
tch_status root_trial_run(tch_context *context, void *user);

/* Judges the outputs; `reference` (host, float64, the same shape) may be NULL. */
tch_status root_trial_judge(const workplace *place, const root_trial *trial, const tch_tensor *reference,
                            root_verdict *verdict);

/* "not finite" and so on. */
const char *root_report_text(tch_report report);

#endif
