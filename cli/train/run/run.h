/* A run of one optimizer. All runs have the same initial weights and batches. */
#ifndef CLI_TRAIN_RUN_H
#define CLI_TRAIN_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include <torchium/network.h>
#include <torchium/optim.h>

#include "curvature.h"

typedef struct train_point {
    int64_t step;
    double seconds;                              /* of training, without measurements and checkpoints */
    double train_loss, test_loss, test_accuracy; /* NAN for an autoencoder */
} train_point;
enum { TRAIN_POINT_NUMBERS = 5 };

typedef struct train_run {
    train_method method;
    tch_network *network;
    tch_optimizer *optimizer;
    const tch_tensor *gradients[TRAIN_PARAMETERS];
    train_curvature_state curvature;
    int64_t step;
    double seconds;
    bool diverged; /* a loss was not finite; the run has stopped */
    train_point *points;
    int64_t point_count, point_room;
} train_run;

tch_status train_run_create(const train_setup *setup, const train_method *method, train_run *run);
void train_run_destroy(train_run *run);

/* One step. Does not synchronize; the caller measures the time. */
tch_status train_run_step(train_setup *setup, train_run *run);

/* Measures the current losses and accuracy. */
tch_status train_run_measure(const train_setup *setup, train_run *run, train_point *point);

/* Appends a measurement; false if out of memory. A loss that is not finite marks the run as diverged. */
bool train_run_record(train_run *run, const train_point *point);

/* The first measurement with at most this training loss, or NULL. */
const train_point *train_run_reach(const train_run *run, double loss);

/* The latest measurement, or NULL. */
const train_point *train_run_last(const train_run *run);

#endif
