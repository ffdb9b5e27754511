/* What a step does with per-sample gradients and curvature, between the batch's gradients and the optimizer's step. */
#ifndef CLI_TRAIN_CURVATURE_H
#define CLI_TRAIN_CURVATURE_H

#include <stdint.h>

#include <torchium/kfac.h>
#include <torchium/network.h>
#include <torchium/torchium.h>

#include "data.h"

/* What a method keeps in addition to the optimizer. Members that it has no use for are NULL. */
typedef struct train_curvature_state {
    train_curvature kind;
    tch_network *network;                /* the run's, whose gradients are changed */
    tch_kfac *kfac;                      /* of kfac and ekfac */
    tch_tensor *shares;                  /* [batch], with --per-sample-clip: what is left of each sample's gradient */
    tch_tensor *gram, *weights, *report; /* of natural: [batch, batch], [batch], [] */
} train_curvature_state;

/* What the kind and --per-sample-clip need; to be destroyed also after a failure. */
tch_status train_curvature_create(const train_setup *setup, train_curvature kind, tch_network *network,
                                  train_curvature_state *state);
void train_curvature_destroy(train_curvature_state *state);

/* Turns the gradients of the batch at hand into those that the optimizer gets; `rate` is that of the step. */
tch_status train_curvature_apply(const train_setup *setup, const train_curvature_state *state, int64_t step,
                                 double rate);

/* Bytes of KFAC's state. */
int64_t train_curvature_bytes(const train_curvature_state *state);

#endif
