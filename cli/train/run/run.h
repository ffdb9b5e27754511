/* A run of one optimizer. Runs see the same first weights and the same batches; what differs is the optimizer
 * and its rate. */
#ifndef CLI_TRAIN_RUN_H
#define CLI_TRAIN_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include <torchium/network.h>
#include <torchium/optim.h>

#include "curvature.h"

typedef struct train_point {
    int64_t step;
    double seconds;                              /* of training alone, without measurements and checkpoints */
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
    bool diverged;       /* its loss is no number any more; it goes no further */
    train_point *points; /* the measurements so far */
    int64_t point_count, point_room;
} train_run;

tch_status train_run_create(const train_setup *setup, const train_method *method, train_run *run);
void train_run_destroy(train_run *run);

/* One step. Does not wait for the device, and leaves counting the time to the caller. */
tch_status train_run_step(train_setup *setup, train_run *run);

/* Measures losses and accuracy as they are now, on the rows kept for that. */
tch_status train_run_measure(const train_setup *setup, train_run *run, train_point *point);

/* Keeps a measurement; false when there is no memory for it. A loss that is no number marks the run as diverged. */
bool train_run_record(train_run *run, const train_point *point);

/* The run's first measurement with at most this training loss, or NULL. */
const train_point *train_run_reach(const train_run *run, double loss);

/* The latest measurement, or NULL before the first. */
const train_point *train_run_last(const train_run *run);

#endif
