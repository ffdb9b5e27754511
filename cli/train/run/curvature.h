/* Changes to gradients between the backward pass and the optimizer's step: per-sample clipping and curvature. */
#ifndef CLI_TRAIN_CURVATURE_H
#define CLI_TRAIN_CURVATURE_H

#include <stdint.h>

#include <torchium/kfac.h>
#include <torchium/network.h>
#include <torchium/torchium.h>

#include "data.h"

/* State of a method in addition to the optimizer. Unused members are NULL. */
typedef struct train_curvature_state {
    train_curvature kind;
    tch_network *network;                /* whose gradients are changed; of the run */
    tch_kfac *kfac;                      /* kfac, ekfac */
    tch_tensor *shares;                  /* [batch], with --per-sample-clip: factors of the samples' gradients */
    tch_tensor *gram, *weights, *report; /* natural: [batch, batch], [batch], [] */
} train_curvature_state;

/* Creates the state that the kind and --per-sample-clip need; to be destroyed also after a failure. */
tch_status train_curvature_create(const train_setup *setup, train_curvature kind, tch_network *network,
                                  train_curvature_state *state);
void train_curvature_destroy(train_curvature_state *state);

/* Replaces the gradients of the current batch by those for the optimizer; `rate` is that of the step. */
tch_status train_curvature_apply(const train_setup *setup, const train_curvature_state *state, int64_t step,
                                 double rate);

int64_t train_curvature_bytes(const train_curvature_state *state);

#endif
